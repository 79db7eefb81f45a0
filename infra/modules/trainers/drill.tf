# A drill: AWS FIS sends trainers of this run the notice that the spot market sends, and takes them away after it.
# Nothing happens until somebody starts an experiment: infra/README.md says how.

locals {
  account_id = one(data.aws_caller_identity.current[*].account_id)
  region     = one(data.aws_region.current[*].region)
  instances  = "arn:${data.aws_partition.current.partition}:ec2:${coalesce(local.region, "none")}:${coalesce(local.account_id, "none")}:instance/*"
}

data "aws_caller_identity" "current" {
  count = var.interruption_drill ? 1 : 0
}

data "aws_region" "current" {
  count = var.interruption_drill ? 1 : 0
}

resource "aws_iam_role" "drill" {
  count = var.interruption_drill ? 1 : 0

  name        = "${var.name}-drill"
  description = "holdfast: FIS interrupts trainers of ${local.run_prefix}"
  tags        = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "fis.amazonaws.com" }
      Action    = "sts:AssumeRole"
      Condition = { StringEquals = { "aws:SourceAccount" = local.account_id } }
    }]
  })
}

resource "aws_iam_role_policy" "drill" {
  #checkov:skip=CKV_AWS_355:DescribeInstances, by which FIS finds its targets, has no resource level
  count = var.interruption_drill ? 1 : 0

  name = "interrupt"
  role = aws_iam_role.drill[0].name

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid      = "Find"
        Effect   = "Allow"
        Action   = ["ec2:DescribeInstances"]
        Resource = ["*"]
      },
      {
        Sid      = "InterruptTrainersOfTheRun"
        Effect   = "Allow"
        Action   = ["ec2:SendSpotInstanceInterruptions"]
        Resource = [local.instances]
        Condition = {
          StringEquals = {
            "aws:ResourceTag/Project" = var.project
            "aws:ResourceTag/RunId"   = var.run_id
            "aws:ResourceTag/Role"    = "train"
          }
        }
      },
    ]
  })
}

resource "aws_fis_experiment_template" "interruption" {
  for_each = var.interruption_drill ? { one = "COUNT(1)", all = "ALL" } : {}

  description = "holdfast: spot interruption of ${each.key == "one" ? "one trainer" : "all trainers"} of ${local.run_prefix}"
  role_arn    = aws_iam_role.drill[0].arn
  tags        = merge(var.tags, { Name = "${var.name}-interrupt-${each.key}" })

  action {
    name      = "interrupt"
    action_id = "aws:ec2:send-spot-instance-interruptions"

    parameter {
      key   = "durationBeforeInterruption"
      value = "PT${var.drill_notice_minutes}M"
    }

    target {
      key   = "SpotInstances"
      value = "trainers"
    }
  }

  target {
    name           = "trainers"
    resource_type  = "aws:ec2:spot-instance"
    selection_mode = each.value

    resource_tag {
      key   = "Project"
      value = var.project
    }

    resource_tag {
      key   = "RunId"
      value = var.run_id
    }

    resource_tag {
      key   = "Role"
      value = "train"
    }

    filter {
      path   = "State.Name"
      values = ["running"]
    }
  }

  # A drill is as short as its one action: there is nothing to stop in between.
  stop_condition {
    source = "none"
  }
}
