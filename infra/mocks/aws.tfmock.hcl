# What AWS would answer, for `terraform test`: an account and a region that are not real.

mock_data "aws_caller_identity" {
  defaults = {
    account_id = "123456789012"
    arn        = "arn:aws:iam::123456789012:user/somebody"
  }
}

mock_data "aws_partition" {
  defaults = { partition = "aws" }
}

mock_data "aws_region" {
  defaults = { region = "eu-central-1" }
}

mock_data "aws_ssm_parameter" {
  defaults = { insecure_value = "ami-0123456789abcdef0" }
}

mock_resource "aws_subnet" {
  defaults = {
    id  = "subnet-0123456789abcdef0"
    arn = "arn:aws:ec2:eu-central-1:123456789012:subnet/subnet-0123456789abcdef0"
  }
}

mock_resource "aws_security_group" {
  defaults = { arn = "arn:aws:ec2:eu-central-1:123456789012:security-group/sg-0123456789abcdef0" }
}

mock_resource "aws_placement_group" {
  defaults = { arn = "arn:aws:ec2:eu-central-1:123456789012:placement-group/cluster" }
}

mock_resource "aws_efs_file_system" {
  defaults = {
    id  = "fs-0123456789abcdef0"
    arn = "arn:aws:elasticfilesystem:eu-central-1:123456789012:file-system/fs-0123456789abcdef0"
  }
}

mock_resource "aws_efs_access_point" {
  defaults = {
    id  = "fsap-0123456789abcdef0"
    arn = "arn:aws:elasticfilesystem:eu-central-1:123456789012:access-point/fsap-0123456789abcdef0"
  }
}

mock_resource "aws_launch_template" {
  defaults = {
    arn            = "arn:aws:ec2:eu-central-1:123456789012:launch-template/lt-0123456789abcdef0"
    latest_version = 1
  }
}

mock_resource "aws_iam_role" {
  defaults = { arn = "arn:aws:iam::123456789012:role/some-role" }
}
