# A whole cluster. The bucket is the store, or, with `efs = true`, a file system in the zone of the stager; the bucket then holds
# only what the nodes tell each other. Terraform makes everything that lasts; the launcher raises and ends the instances from
# what `terraform output -json launcher` says.

terraform {
  required_version = ">= 1.9.0"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 6.0"
    }
  }

  # A state on one laptop is lost with it. For more than a trial, name a bucket of your own that is not the runs':
  # backend "s3" { bucket = "…", key = "holdfast/cluster", region = "…", use_lockfile = true }
}

provider "aws" {
  region = var.region
}

data "aws_caller_identity" "current" {}

locals {
  name        = lower(replace("${var.project}-${var.run_id}", "/[._]/", "-"))
  bucket_name = coalesce(var.bucket_name, "holdfast-${lower(replace(var.project, "/[._]/", "-"))}-${data.aws_caller_identity.current.account_id}-${var.region}")

  # What every resource carries, and what the launcher puts on what it raises (there ManagedBy is holdfast).
  run_tags = { Project = var.project, RunId = var.run_id }
  tags     = merge(var.tags, local.run_tags, { ManagedBy = "terraform" })
}

module "storage" {
  source = "../../modules/storage"

  name          = local.name
  bucket_name   = local.bucket_name
  kms_key_arn   = var.kms_key_arn
  expire_days   = var.expire_days
  force_destroy = var.force_destroy

  efs                      = var.efs
  run_folder               = "/${var.project}/${var.run_id}"
  vpc_id                   = module.network.vpc_id
  subnets                  = module.network.subnets
  client_security_group_id = module.network.security_group_id

  tags = local.tags
}

module "network" {
  source = "../../modules/network"

  name               = local.name
  cidr_block         = var.cidr_block
  availability_zones = var.availability_zones
  bucket_arn         = module.storage.bucket_arn
  tags               = local.tags
}

module "trainers" {
  source = "../../modules/trainers"

  name               = local.name
  project            = var.project
  run_id             = var.run_id
  bucket             = module.storage.bucket
  bucket_arn         = module.storage.bucket_arn
  kms_key_arn        = var.kms_key_arn
  efs                = module.storage.efs
  security_group_id  = module.network.security_group_id
  placement_group    = module.network.placement_group
  instance_types     = var.trainer_instance_types
  ami_ssm_parameter  = var.trainer_ami_ssm_parameter
  holdfast_package   = var.trainer_package
  interruption_drill = var.interruption_drill
  tags               = local.tags
}

module "stager" {
  source = "../../modules/stager"

  name              = local.name
  project           = var.project
  run_id            = var.run_id
  bucket            = module.storage.bucket
  bucket_arn        = module.storage.bucket_arn
  kms_key_arn       = var.kms_key_arn
  efs               = module.storage.efs
  security_group_id = module.network.security_group_id
  placement_group   = module.network.placement_group
  instance_type     = var.stager_instance_type
  holdfast_package  = var.stager_package
  ring_bytes        = var.ring_bytes
  operator_role_arn = var.stager_relaunches ? module.operator.role_arn : null
  tags              = local.tags
}

module "operator" {
  source = "../../modules/operator"

  name                 = local.name
  project              = var.project
  run_id               = var.run_id
  principal_arns       = length(var.operator_arns) == 0 ? [] : concat(var.operator_arns, var.stager_relaunches ? [module.stager.role_arn] : [])
  launch_template_arns = [module.trainers.launch_template_arn, module.stager.launch_template_arn]
  node_role_arns       = [module.trainers.role_arn, module.stager.role_arn]
  instance_types       = concat(var.trainer_instance_types, [module.stager.instance_type])
  ami_ids              = [module.trainers.ami_id, module.stager.ami_id]
  subnet_arns          = module.network.subnet_arns
  security_group_arns  = [module.network.security_group_arn]
  placement_group_arns = [module.network.placement_group_arn]
  tags                 = local.tags
}
