# The node that stays: on demand, in the trainers' zone and placement group. It holds the ring, writes the run, and is where
# mpirun and the launcher's supervision live. The launcher raises it from the template; it is never part of the spot fleet.

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
        # S3 knows no prefix for this one; it shows names of unfinished uploads, not their bytes.
        {
          Sid      = "FindUploadsToResume"
          Effect   = "Allow"
          Action   = ["s3:ListBucketMultipartUploads"]
          Resource = [var.bucket_arn]
        },
        # DeleteObject is retention: old checkpoints of this run, and the small object that tries out the rights.
        {
          Sid    = "WriteTheRun"
          Effect = "Allow"
          Action = [
            "s3:AbortMultipartUpload",
            "s3:DeleteObject",
            "s3:GetObject",
            "s3:ListMultipartUploadParts",
            "s3:PutObject",
          ]
          Resource = [local.objects]
        },
      ],
      # A multipart upload needs both: the parts are decrypted when they are joined.
      var.kms_key_arn == null ? [] : [
        {
          Sid      = "WriteWithItsKey"
          Effect   = "Allow"
          Action   = ["kms:Decrypt", "kms:GenerateDataKey"]
          Resource = [var.kms_key_arn]
        },
      ],
      var.efs == null ? [] : [
        {
          Sid      = "MountToWrite"
          Effect   = "Allow"
          Action   = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
          Resource = [var.efs.arn]
          # Whatever else lies on the file system is out of reach.
          Condition = { StringEquals = { "elasticfilesystem:AccessPointArn" = var.efs.access_point_arn } }
        },
      ],
      var.operator_role_arn == null ? [] : [
        {
          Sid      = "RelaunchAsOperator"
          Effect   = "Allow"
          Action   = ["sts:AssumeRole"]
          Resource = [var.operator_role_arn]
        },
      ],
    )
  }
}

module "node" {
  source = "../node"

  name              = var.name
  role              = "stager"
  project           = var.project
  run_id            = var.run_id
  policy            = jsonencode(local.policy)
  bucket            = var.bucket
  security_group_id = var.security_group_id
  placement_group   = var.placement_group
  instance_type     = var.instance_type
  ami_id            = var.ami_id
  ami_ssm_parameter = var.ami_ssm_parameter
  root_device_name  = var.root_device_name
  root_volume_gib   = var.root_volume_gib
  imds_hop_limit    = var.imds_hop_limit
  holdfast_package  = var.holdfast_package
  settings          = merge({ ring_bytes = var.ring_bytes }, var.settings)
  services          = { "holdfast-flusher.service" = file("${path.module}/files/holdfast-flusher.service") }
  efs_id            = try(var.efs.id, null)

  efs_access_point_id = try(var.efs.access_point_id, null)
  tags                = var.tags
}
