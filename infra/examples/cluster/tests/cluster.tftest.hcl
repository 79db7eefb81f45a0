mock_provider "aws" {
  source = "../../mocks"
}

# A mocked resource has the same ARN wherever it is made; these tell the roles and templates apart.
override_resource {
  target = module.trainers.module.node.aws_iam_role.this
  values = { arn = "arn:aws:iam::123456789012:role/gpt-one-train" }
}

override_resource {
  target = module.stager.module.node.aws_iam_role.this
  values = { arn = "arn:aws:iam::123456789012:role/gpt-one-stager" }
}

override_resource {
  target = module.operator.aws_iam_role.operator
  values = { arn = "arn:aws:iam::123456789012:role/gpt-one-operator" }
}

override_resource {
  target = module.trainers.module.node.aws_launch_template.this
  values = {
    id             = "lt-0aaaaaaaaaaaaaaaa"
    arn            = "arn:aws:ec2:eu-central-1:123456789012:launch-template/lt-0aaaaaaaaaaaaaaaa"
    latest_version = 3
  }
}

override_resource {
  target = module.stager.module.node.aws_launch_template.this
  values = {
    id             = "lt-0bbbbbbbbbbbbbbbb"
    arn            = "arn:aws:ec2:eu-central-1:123456789012:launch-template/lt-0bbbbbbbbbbbbbbbb"
    latest_version = 1
  }
}

variables {
  region             = "eu-central-1"
  availability_zones = ["eu-central-1a", "eu-central-1b"]
  project            = "gpt"
  run_id             = "one"
  trainer_package    = "holdfast[trainer,openmpi] @ https://wheels.example/YOU/holdfast-0.2.0-py3-none-any.whl"
  stager_package     = "holdfast[stager,openmpi] @ https://wheels.example/YOU/holdfast-0.2.0-py3-none-any.whl"
}

run "whole" {
  assert {
    condition     = output.launcher.trainer_launch_template == { id = "lt-0aaaaaaaaaaaaaaaa", version = "3" } && output.launcher.stager_launch_template == { id = "lt-0bbbbbbbbbbbbbbbb", version = "1" }
    error_message = "The launcher raises from these templates, by version."
  }

  assert {
    condition     = output.launcher.store_url == "s3://${output.launcher.bucket}/gpt/one/checkpoints" && output.launcher.run_prefix == "gpt/one"
    error_message = "The store is the run's prefix in our bucket."
  }

  assert {
    condition     = output.launcher.bucket == "holdfast-gpt-123456789012-eu-central-1"
    error_message = "Without a name the bucket's is made of project, account and region."
  }

  assert {
    condition     = output.launcher.availability_zone == "eu-central-1a" && output.launcher.subnet_id == output.launcher.subnets["eu-central-1a"]
    error_message = "Stager and trainers are in the first zone."
  }
}

run "with_efs" {
  variables {
    efs = true
  }

  assert {
    condition     = output.launcher.store_url == "/mnt/efs/gpt/one/checkpoints" && output.launcher.run_prefix == "gpt/one"
    error_message = "The store is the run's folder on the file system."
  }
}

run "with_kms_and_drills" {
  variables {
    kms_key_arn        = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    interruption_drill = true
    operator_arns      = ["arn:aws:iam::123456789012:user/somebody"]
  }

  assert {
    condition     = toset(keys(output.drills)) == toset(["one", "all"])
    error_message = "A drill for one trainer, and one for all."
  }
}

run "a_zone_of_another_region_is_refused" {
  command = plan

  variables {
    availability_zones = ["us-east-1a"]
  }

  expect_failures = [var.availability_zones]
}
