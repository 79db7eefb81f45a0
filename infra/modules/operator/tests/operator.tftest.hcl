mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name                 = "gpt-one"
  project              = "gpt"
  run_id               = "one"
  launch_template_arns = ["arn:aws:ec2:eu-central-1:123456789012:launch-template/lt-train", "arn:aws:ec2:eu-central-1:123456789012:launch-template/lt-stager"]
  node_role_arns       = ["arn:aws:iam::123456789012:role/gpt-one-train", "arn:aws:iam::123456789012:role/gpt-one-stager"]
  instance_types       = ["g6.2xlarge", "c6in.4xlarge"]
  ami_ids              = ["ami-0123456789abcdef0"]
  subnet_arns          = ["arn:aws:ec2:eu-central-1:123456789012:subnet/subnet-1"]
  security_group_arns  = ["arn:aws:ec2:eu-central-1:123456789012:security-group/sg-1"]
  placement_group_arns = ["arn:aws:ec2:eu-central-1:123456789012:placement-group/cluster"]
}

run "it_passes_exactly_the_two_node_roles_and_only_to_ec2" {
  assert {
    condition = [
      for statement in local.policy.Statement : { roles = statement.Resource, to = statement.Condition.StringEquals["iam:PassedToService"] }
      if contains(statement.Action, "iam:PassRole")
    ] == [{ roles = var.node_role_arns, to = "ec2.amazonaws.com" }]
    error_message = "Whoever may pass any role has any role."
  }
}

run "it_ends_only_what_carries_the_runs_tags" {
  assert {
    condition = [
      for statement in local.policy.Statement : statement.Condition.StringEquals
      if length(setintersection(statement.Action, ["ec2:TerminateInstances", "ec2:DeleteFleets"])) > 0
    ] == [for kind in ["instances", "fleets"] : { "aws:ResourceTag/Project" = "gpt", "aws:ResourceTag/RunId" = "one" }]
    error_message = "Ending must go by Project and RunId."
  }
}

run "it_raises_only_with_tags_from_our_templates_and_types" {
  assert {
    condition = [
      for statement in local.policy.Statement : statement.Condition
      if anytrue([for resource in statement.Resource : endswith(resource, ":instance/*")]) && contains(statement.Action, "ec2:RunInstances")
      ] == [{
        StringEquals = {
          "aws:RequestTag/Project" = "gpt"
          "aws:RequestTag/RunId"   = "one"
          "ec2:InstanceType"       = var.instance_types
        }
        ArnEquals = { "ec2:LaunchTemplate" = var.launch_template_arns }
    }]
    error_message = "Without the template the nodes would be without IMDSv2 and encryption; without the types, without a limit of price."
  }

  assert {
    condition     = alltrue([for statement in local.policy.Statement : try(statement.Condition.StringEquals["ec2:CreateAction"], null) != null if contains(statement.Action, "ec2:CreateTags")])
    error_message = "Tags may be set while something is created, never on what is there: that would make foreign instances ours."
  }
}

run "wildcards_only_where_there_is_no_resource" {
  assert {
    condition     = alltrue([for statement in local.policy.Statement : statement.Sid == "Look" if contains(statement.Resource, "*")])
    error_message = "Only describing calls may have Resource *."
  }

  assert {
    condition     = alltrue(flatten([for statement in local.policy.Statement : [for action in statement.Action : startswith(action, "ec2:Describe") || action == "ec2:GetSpotPlacementScores"] if statement.Sid == "Look"]))
    error_message = "What has Resource * may only look."
  }
}

run "a_wildcard_for_roles_is_refused" {
  command = plan

  variables {
    node_role_arns = ["arn:aws:iam::123456789012:role/*", "arn:aws:iam::123456789012:role/gpt-one-stager"]
  }

  expect_failures = [var.node_role_arns]
}

run "a_wildcard_for_types_is_refused" {
  command = plan

  variables {
    instance_types = ["p5.*"]
  }

  expect_failures = [var.instance_types]
}
