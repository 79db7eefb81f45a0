# What stager and trainers have in common: a role of their own, a launch template, and the user data that makes a bare machine
# a node. Made by the modules `stager` and `trainers`; not to be used alone.
#
#   node.env, scripts, units ──cloud-init──► holdfast-bootstrap ──► user, venv, settings from instance tags, services

data "aws_region" "current" {}

data "aws_ssm_parameter" "image" {
  count = var.ami_id == null ? 1 : 0

  name = var.ami_ssm_parameter
}

locals {
  full_name = "${var.name}-${var.role}"

  # The launcher raises and ends instances by these; the user data reads RunId back on the instance.
  instance_tags = merge(var.tags, {
    Name      = local.full_name
    Project   = var.project
    RunId     = var.run_id
    Role      = var.role
    ManagedBy = "holdfast"
  })

  on_file_system = var.efs_id != null
  store_root     = local.on_file_system ? "${var.efs_path}/${var.project}" : "s3://${var.bucket}/${var.project}"

  # Values come from validated variables: no quotes in them, so that the shell and systemd read the same.
  node_env = <<-END
    HOLDFAST_ROLE="${var.role}"
    HOLDFAST_PROJECT="${var.project}"
    HOLDFAST_BUCKET="${var.bucket}"
    HOLDFAST_REGION="${data.aws_region.current.region}"
    HOLDFAST_STORE_ROOT="${local.store_root}"
    HOLDFAST_PACKAGE="${var.holdfast_package}"
    HOLDFAST_EFS_ID="${local.on_file_system ? var.efs_id : ""}"
    HOLDFAST_EFS_ACCESS_POINT="${local.on_file_system ? var.efs_access_point_id : ""}"
    HOLDFAST_EFS_PATH="${var.efs_path}/${var.project}/${var.run_id}"
    HOLDFAST_UNITS="${join(" ", concat(["holdfast-keys.timer"], keys(var.services)))}"
  END

  settings_env = join("", [for key in sort(keys(var.settings)) : "HOLDFAST_${upper(key)}=${var.settings[key]}\n"])

  files = merge(
    {
      "/etc/holdfast/node.env"                    = { mode = "0644", content = local.node_env }
      "/etc/holdfast/settings.env"                = { mode = "0644", content = local.settings_env }
      "/usr/local/sbin/holdfast-bootstrap"        = { mode = "0755", content = file("${path.module}/files/bootstrap.sh") }
      "/usr/local/lib/holdfast/keys.py"           = { mode = "0644", content = file("${path.module}/files/keys.py") }
      "/etc/ssh/ssh_config.d/holdfast.conf"       = { mode = "0644", content = file("${path.module}/files/ssh.conf") }
      "/etc/systemd/system/holdfast-keys.service" = { mode = "0644", content = file("${path.module}/files/holdfast-keys.service") }
      "/etc/systemd/system/holdfast-keys.timer"   = { mode = "0644", content = file("${path.module}/files/holdfast-keys.timer") }
    },
    { for unit, content in var.services : "/etc/systemd/system/${unit}" => { mode = "0644", content = content } },
  )

  user_data = join("\n", ["#cloud-config", yamlencode({
    write_files = [for path, file in local.files : { path = path, permissions = file.mode, content = file.content }]
    runcmd      = [["/usr/local/sbin/holdfast-bootstrap"]]
  })])
}

# Pinned in the state: a newer image of the same name would otherwise change the template with any apply, in the middle of a
# run. `terraform apply -replace='...terraform_data.image'` takes the newest.
resource "terraform_data" "image" {
  input = var.ami_id == null ? data.aws_ssm_parameter.image[0].insecure_value : var.ami_id

  lifecycle {
    ignore_changes = [input]
  }

  triggers_replace = [var.ami_id, var.ami_ssm_parameter]
}

# -- what a node may do ------------------------------------------------------------------------------------------

resource "aws_iam_role" "this" {
  name        = local.full_name
  description = "holdfast: nodes with the role ${var.role} of ${var.project}/${var.run_id}"
  tags        = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "ec2.amazonaws.com" }
      Action    = "sts:AssumeRole"
    }]
  })
}

resource "aws_iam_role_policy" "work" {
  name   = "work"
  role   = aws_iam_role.this.name
  policy = var.policy
}

# Session Manager, and no more: the managed policy of AWS would also let a node read every parameter of the account.
resource "aws_iam_role_policy" "session" {
  #checkov:skip=CKV_AWS_290:these actions have no resource level; they let Session Manager open channels to this machine
  #checkov:skip=CKV_AWS_355:as above
  name = "session"
  role = aws_iam_role.this.name

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid    = "SessionManager"
      Effect = "Allow"
      Action = [
        "ssm:UpdateInstanceInformation",
        "ssmmessages:CreateControlChannel",
        "ssmmessages:CreateDataChannel",
        "ssmmessages:OpenControlChannel",
        "ssmmessages:OpenDataChannel",
      ]
      Resource = "*"
    }]
  })
}

resource "aws_iam_instance_profile" "this" {
  name = local.full_name
  role = aws_iam_role.this.name
  tags = var.tags
}

# -- how a node is raised ----------------------------------------------------------------------------------------

resource "aws_launch_template" "this" {
  name                   = local.full_name
  description            = "holdfast: a node with the role ${var.role}"
  update_default_version = true
  image_id               = terraform_data.image.output
  instance_type          = var.instance_type
  user_data              = base64encode(local.user_data)
  vpc_security_group_ids = [var.security_group_id]
  tags                   = var.tags

  # A node that shuts itself down is gone, with its disk: nothing is on it that is not elsewhere.
  instance_initiated_shutdown_behavior = "terminate"

  iam_instance_profile {
    arn = aws_iam_instance_profile.this.arn
  }

  placement {
    group_name = var.placement_group
  }

  # Session tokens only (IMDSv2), so that a request forged through the training script does not get the role's credentials.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = var.imds_hop_limit
    instance_metadata_tags      = "enabled"
  }

  block_device_mappings {
    device_name = var.root_device_name

    ebs {
      encrypted             = true
      volume_type           = "gp3"
      volume_size           = var.root_volume_gib
      delete_on_termination = true
    }
  }

  # Spot by a plain `run-instances`; EC2 Fleet and Auto Scaling refuse a template that says so, and say it themselves.
  dynamic "instance_market_options" {
    for_each = var.spot_in_template ? [true] : []

    content {
      market_type = "spot"

      spot_options {
        spot_instance_type             = "one-time"
        instance_interruption_behavior = "terminate"
      }
    }
  }

  # Not "spot-instances-request": with it, an instance on demand from this template is refused.
  dynamic "tag_specifications" {
    for_each = ["instance", "volume", "network-interface"]

    content {
      resource_type = tag_specifications.value
      tags          = local.instance_tags
    }
  }

  lifecycle {
    precondition {
      condition     = length(local.user_data) <= 16384
      error_message = "The user data has ${length(local.user_data)} bytes, and EC2 takes 16384: shorten settings or services."
    }
  }
}
