# The nodes that the spot market takes away. They read their run to go on where it was, and may write nothing: what they
# have to save goes to the stager over MPI. The launcher raises them from the template, all or none (EC2 Fleet, instant).

data "aws_partition" "current" {}

locals {
  run_prefix = "${var.project}/${var.run_id}"
  objects    = "${var.bucket_arn}/${local.run_prefix}/*"

  policy = {
    Version = "2012-10-17"
    Statement = concat(
      [
        {
          Sid       = "ListTheRun"
          Effect    = "Allow"
          Action    = ["s3:ListBucket"]
          Resource  = [var.bucket_arn]
          Condition = { StringLike = { "s3:prefix" = ["${local.run_prefix}/*"] } }
        },
        {
          Sid      = "ReadTheRun"
          Effect   = "Allow"
          Action   = ["s3:GetObject"]
          Resource = [local.objects]
        },
      ],
      var.kms_key_arn == null ? [] : [
        {
          Sid      = "UseItsKey"
          Effect   = "Allow"
          Action   = ["kms:Decrypt"]
          Resource = [var.kms_key_arn]
        },
      ],
      var.efs == null ? [] : [
        {
          Sid      = "MountToRead"
          Effect   = "Allow"
          Action   = ["elasticfilesystem:ClientMount"]
          Resource = [var.efs.arn]
          # Whatever else lies on the file system is out of reach.
          Condition = { StringEquals = { "elasticfilesystem:AccessPointArn" = var.efs.access_point_arn } }
        },
      ],
    )
  }
}

module "node" {
  source = "../node"

  name              = var.name
  role              = "train"
  project           = var.project
  run_id            = var.run_id
  policy            = jsonencode(local.policy)
  bucket            = var.bucket
  security_group_id = var.security_group_id
  placement_group   = var.placement_group
  instance_type     = var.instance_types[0]
  ami_id            = var.ami_id
  ami_ssm_parameter = var.ami_ssm_parameter
  root_device_name  = var.root_device_name
  root_volume_gib   = var.root_volume_gib
  imds_hop_limit    = var.imds_hop_limit
  spot_in_template  = var.spot_in_template
  holdfast_package  = var.holdfast_package
  settings          = var.settings
  efs_id            = try(var.efs.id, null)

  efs_access_point_id = try(var.efs.access_point_id, null)
  tags                = var.tags
}

# Off unless asked for. A group raises what it gets, and a training run needs all ranks or none; it also ends healthy nodes
# for reasons of its own. Two of these are switched off below: with capacity_rebalance it raises a spare on a mere
# recommendation and then ends a rank that was fine, and AZRebalance moves nodes out of the placement group.
resource "aws_autoscaling_group" "trainers" {
  count = var.autoscaling == null ? 0 : 1

  name                = "${var.name}-train"
  min_size            = 0
  max_size            = var.autoscaling.size
  desired_capacity    = var.autoscaling.size
  vpc_zone_identifier = var.autoscaling.subnet_ids
  capacity_rebalance  = false
  suspended_processes = ["AZRebalance"]

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = 0
      spot_allocation_strategy                 = "price-capacity-optimized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = module.node.launch_template.id
        version            = module.node.launch_template.version
      }

      dynamic "override" {
        for_each = var.instance_types

        content {
          instance_type = override.value
        }
      }
    }
  }

  dynamic "tag" {
    for_each = merge(var.tags, { Project = var.project, RunId = var.run_id, Role = "train" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }
}
