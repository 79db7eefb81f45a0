# The role of whoever raises and ends the nodes of one run: the launcher, and the stager when it relaunches.
#
#   may raise   from our two templates, into our subnets and groups, of the listed types, and only with the run's tags
#   may pass    exactly the two node roles, and only to EC2
#   may end     what carries the run's tags

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

data "aws_region" "current" {}

locals {
  partition = data.aws_partition.current.partition
  account   = data.aws_caller_identity.current.account_id
  region    = data.aws_region.current.region
  ec2       = "arn:${local.partition}:ec2:${local.region}:${local.account}"

  our_parts = concat(
    var.launch_template_arns,
    var.subnet_arns,
    var.placement_group_arns,
    [for image in distinct(var.ami_ids) : "arn:${local.partition}:ec2:${local.region}::image/${image}"],
  )

  # AWS evaluates the tags of a launch template as tags of the request.
  asks_for_our_tags = {
    "aws:RequestTag/Project" = var.project
    "aws:RequestTag/RunId"   = var.run_id
  }

  has_our_tags = {
    "aws:ResourceTag/Project" = var.project
    "aws:ResourceTag/RunId"   = var.run_id
  }

  policy = {
    Version = "2012-10-17"
    Statement = [
      {
        Sid    = "Look"
        Effect = "Allow"
        Action = [
          "ec2:DescribeAvailabilityZones",
          "ec2:DescribeFleets",
          "ec2:DescribeImages",
          "ec2:DescribeInstanceStatus",
          "ec2:DescribeInstanceTypeOfferings",
          "ec2:DescribeInstanceTypes",
          "ec2:DescribeInstances",
          "ec2:DescribeLaunchTemplateVersions",
          "ec2:DescribeLaunchTemplates",
          "ec2:DescribeNetworkInterfaces",
          "ec2:DescribePlacementGroups",
          "ec2:DescribeSecurityGroups",
          "ec2:DescribeSpotInstanceRequests",
          "ec2:DescribeSpotPriceHistory",
          "ec2:DescribeSubnets",
          "ec2:DescribeTags",
          "ec2:DescribeVolumes",
          "ec2:GetSpotPlacementScores",
        ]
        Resource = ["*"]
      },
      {
        Sid      = "RaiseOurInstances"
        Effect   = "Allow"
        Action   = ["ec2:RunInstances"]
        Resource = ["${local.ec2}:instance/*"]
        Condition = {
          StringEquals = merge(local.asks_for_our_tags, { "ec2:InstanceType" = var.instance_types })
          ArnEquals    = { "ec2:LaunchTemplate" = var.launch_template_arns }
        }
      },
      {
        Sid       = "RaiseTheirDisksAndInterfaces"
        Effect    = "Allow"
        Action    = ["ec2:RunInstances"]
        Resource  = ["${local.ec2}:network-interface/*", "${local.ec2}:volume/*"]
        Condition = { StringEquals = local.asks_for_our_tags }
      },
      {
        Sid      = "RaiseFromOurParts"
        Effect   = "Allow"
        Action   = ["ec2:RunInstances"]
        Resource = concat(local.our_parts, var.security_group_arns, ["${local.ec2}:spot-instances-request/*"])
      },
      {
        Sid       = "AskForOurFleets"
        Effect    = "Allow"
        Action    = ["ec2:CreateFleet"]
        Resource  = ["${local.ec2}:fleet/*"]
        Condition = { StringEquals = local.asks_for_our_tags }
      },
      # What a fleet raises goes through RunInstances, and so through the conditions above.
      {
        Sid      = "AskForFleetsOfOurParts"
        Effect   = "Allow"
        Action   = ["ec2:CreateFleet"]
        Resource = concat(local.our_parts, ["${local.ec2}:instance/*", "${local.ec2}:volume/*"])
      },
      # The tags themselves are checked where the thing is raised; what is there already cannot be tagged.
      {
        Sid    = "TagWhileRaising"
        Effect = "Allow"
        Action = ["ec2:CreateTags"]
        Resource = [
          "${local.ec2}:fleet/*",
          "${local.ec2}:instance/*",
          "${local.ec2}:network-interface/*",
          "${local.ec2}:volume/*",
        ]
        Condition = {
          StringEquals = { "ec2:CreateAction" = ["CreateFleet", "RunInstances"] }
        }
      },
      {
        Sid       = "EndOurInstances"
        Effect    = "Allow"
        Action    = ["ec2:TerminateInstances"]
        Resource  = ["${local.ec2}:instance/*"]
        Condition = { StringEquals = local.has_our_tags }
      },
      {
        Sid       = "SeeAndEndOurFleets"
        Effect    = "Allow"
        Action    = ["ec2:DeleteFleets", "ec2:DescribeFleetHistory", "ec2:DescribeFleetInstances"]
        Resource  = ["${local.ec2}:fleet/*"]
        Condition = { StringEquals = local.has_our_tags }
      },
      {
        Sid       = "PassTheTwoNodeRoles"
        Effect    = "Allow"
        Action    = ["iam:PassRole"]
        Resource  = var.node_role_arns
        Condition = { StringEquals = { "iam:PassedToService" = "ec2.amazonaws.com" } }
      },
      {
        Sid      = "OpenSessionsToOurs"
        Effect   = "Allow"
        Action   = ["ssm:StartSession"]
        Resource = ["${local.ec2}:instance/*"]
        Condition = { StringEquals = {
          "ssm:resourceTag/Project" = var.project
          "ssm:resourceTag/RunId"   = var.run_id
        } }
      },
      {
        Sid    = "SessionsAsShellOrSsh"
        Effect = "Allow"
        Action = ["ssm:StartSession"]
        Resource = [
          "arn:${local.partition}:ssm:${local.region}:${local.account}:document/SSM-SessionManagerRunShell",
          "arn:${local.partition}:ssm:${local.region}::document/AWS-StartSSHSession",
        ]
      },
      {
        Sid      = "EndOwnSessions"
        Effect   = "Allow"
        Action   = ["ssm:ResumeSession", "ssm:TerminateSession"]
        Resource = ["arn:${local.partition}:ssm:*:*:session/$${aws:username}-*", "arn:${local.partition}:ssm:*:*:session/$${aws:userid}-*"]
      },
    ]
  }
}

resource "aws_iam_role" "operator" {
  name        = "${var.name}-operator"
  description = "holdfast: raises and ends the nodes of ${var.project}/${var.run_id}"
  tags        = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { AWS = length(var.principal_arns) > 0 ? var.principal_arns : ["arn:${local.partition}:iam::${local.account}:root"] }
      Action    = "sts:AssumeRole"
    }]
  })
}

resource "aws_iam_role_policy" "operator" {
  #checkov:skip=CKV_AWS_355:the calls of "Look" have no resource level
  #checkov:skip=CKV_AWS_290:what writes is bound to our tags, templates and subnets; the check does not read conditions
  name   = "operate"
  role   = aws_iam_role.operator.name
  policy = jsonencode(local.policy)
}
