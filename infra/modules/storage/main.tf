# Lv.2: the bucket with the runs, and if wanted a file system (EFS). Nothing here is open to anybody but the roles that the
# other modules make; what is left over is removed by itself.

data "aws_partition" "current" {}

locals {
  owner_id = 873 # the user `holdfast` on every node: user_id in modules/node/files/bootstrap.sh
}

resource "aws_s3_bucket" "runs" {
  #checkov:skip=CKV_AWS_18:access logs need a second bucket; CloudTrail data events are the organisation's to switch on
  #checkov:skip=CKV_AWS_144:a checkpoint is worth its newest copy; another region would double the cost of every save
  #checkov:skip=CKV_AWS_145:KMS is on when kms_key_arn is given; the default is SSE-S3, which costs no request fees
  #checkov:skip=CKV_AWS_21:versioning is a variable; by default a pruned checkpoint must not go on costing
  #checkov:skip=CKV2_AWS_62:nothing waits for events of this bucket
  bucket        = var.bucket_name
  force_destroy = var.force_destroy
  tags          = merge(var.tags, { Name = var.bucket_name })
}

resource "aws_s3_bucket_public_access_block" "runs" {
  bucket                  = aws_s3_bucket.runs.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "runs" {
  bucket = aws_s3_bucket.runs.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "runs" {
  bucket = aws_s3_bucket.runs.id

  rule {
    # One data key for the bucket instead of one for each part: KMS bills and throttles requests.
    bucket_key_enabled = var.kms_key_arn != null

    apply_server_side_encryption_by_default {
      sse_algorithm     = var.kms_key_arn == null ? "AES256" : "aws:kms"
      kms_master_key_id = var.kms_key_arn
    }
  }
}

resource "aws_s3_bucket_versioning" "runs" {
  bucket = aws_s3_bucket.runs.id

  versioning_configuration {
    status = var.versioning ? "Enabled" : "Suspended"
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "runs" {
  bucket = aws_s3_bucket.runs.id

  # Parts of an upload that nobody finishes are billed and never listed. The flusher resumes uploads after a crash, so the
  # limit is longer than any flush, and holds even where somebody sleeps over a broken run.
  rule {
    id     = "abort-incomplete-multipart"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = var.abort_multipart_days
    }
  }

  # A run that is alive writes new checkpoints; one that has been silent for so long is history.
  rule {
    id     = "expire-old-runs"
    status = var.expire_days > 0 ? "Enabled" : "Disabled"

    filter {}

    expiration {
      days = max(var.expire_days, 1)
    }
  }

  rule {
    id     = "forget-old-versions"
    status = var.versioning ? "Enabled" : "Disabled"

    filter {}

    noncurrent_version_expiration {
      noncurrent_days = var.noncurrent_days
    }
  }
}

resource "aws_s3_bucket_policy" "runs" {
  bucket = aws_s3_bucket.runs.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "TlsOnly"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:*"
        Resource  = [aws_s3_bucket.runs.arn, "${aws_s3_bucket.runs.arn}/*"]
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
      },
    ]
  })

  # A policy that comes while the block is being set may be refused.
  depends_on = [aws_s3_bucket_public_access_block.runs]
}

# -- EFS, for those who want a file system -----------------------------------------------------------------------

resource "aws_efs_file_system" "this" {
  #checkov:skip=CKV_AWS_184:a key of one's own is used when kms_key_arn is given; without, EFS encrypts with its own
  count = var.efs ? 1 : 0

  encrypted       = true
  kms_key_id      = var.kms_key_arn
  throughput_mode = "elastic"
  tags            = merge(var.tags, { Name = var.name })
}

# Whoever has a file system policy has no anonymous clients: what a node may do is in its role, and only over TLS.
resource "aws_efs_file_system_policy" "this" {
  count = var.efs ? 1 : 0

  file_system_id = aws_efs_file_system.this[0].id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "TlsOnly"
        Effect    = "Deny"
        Principal = { AWS = "*" }
        Action    = "*"
        Resource  = aws_efs_file_system.this[0].arn
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
      },
      # Without an access point a client would see the folders of all runs.
      {
        Sid       = "AccessPointOnly"
        Effect    = "Deny"
        Principal = { AWS = "*" }
        Action    = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientRootAccess", "elasticfilesystem:ClientWrite"]
        Resource  = aws_efs_file_system.this[0].arn
        Condition = { Null = { "elasticfilesystem:AccessPointArn" = "true" } }
      },
    ]
  })
}

# The run's folder, as the root of all that a node of this run can see. EFS makes it at the first mount, for the user `holdfast`.
resource "aws_efs_access_point" "run" {
  count = var.efs ? 1 : 0

  file_system_id = aws_efs_file_system.this[0].id
  tags           = merge(var.tags, { Name = var.name })

  # Whoever a client says it is, root included, it acts as this user.
  posix_user {
    uid = local.owner_id
    gid = local.owner_id
  }

  root_directory {
    path = var.run_folder

    creation_info {
      owner_uid   = local.owner_id
      owner_gid   = local.owner_id
      permissions = "0750"
    }
  }
}

resource "aws_security_group" "efs" {
  #checkov:skip=CKV2_AWS_5:it is attached to the mount targets below
  count = var.efs ? 1 : 0

  name        = "${var.name}-efs"
  description = "EFS of a holdfast cluster: NFS from the nodes"
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = "${var.name}-efs" })
}

resource "aws_vpc_security_group_ingress_rule" "efs" {
  count = var.efs ? 1 : 0

  security_group_id            = aws_security_group.efs[0].id
  description                  = "NFS from the nodes"
  ip_protocol                  = "tcp"
  from_port                    = 2049
  to_port                      = 2049
  referenced_security_group_id = var.client_security_group_id
}

resource "aws_vpc_security_group_egress_rule" "clients" {
  count = var.efs ? 1 : 0

  security_group_id            = var.client_security_group_id
  description                  = "NFS to EFS"
  ip_protocol                  = "tcp"
  from_port                    = 2049
  to_port                      = 2049
  referenced_security_group_id = aws_security_group.efs[0].id
}

# One for each zone that may hold the stager: traffic between zones is billed, and slower.
resource "aws_efs_mount_target" "zone" {
  for_each = var.efs ? var.subnets : {}

  file_system_id  = aws_efs_file_system.this[0].id
  subnet_id       = each.value
  security_groups = [aws_security_group.efs[0].id]
}
