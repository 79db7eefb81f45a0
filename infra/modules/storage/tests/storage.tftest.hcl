mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name        = "gpt-one"
  bucket_name = "holdfast-gpt"
}

run "the_bucket_is_closed_to_the_public" {
  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.runs.block_public_acls,
      aws_s3_bucket_public_access_block.runs.block_public_policy,
      aws_s3_bucket_public_access_block.runs.ignore_public_acls,
      aws_s3_bucket_public_access_block.runs.restrict_public_buckets,
    ])
    error_message = "All four locks against public access must be on."
  }

  assert {
    condition     = one(aws_s3_bucket_ownership_controls.runs.rule).object_ownership == "BucketOwnerEnforced"
    error_message = "ACLs must be off."
  }
}

run "the_bucket_takes_tls_only" {
  assert {
    condition = anytrue([
      for statement in jsondecode(aws_s3_bucket_policy.runs.policy).Statement :
      statement.Effect == "Deny" && statement.Action == "s3:*" && statement.Principal == "*"
      && try(statement.Condition.Bool["aws:SecureTransport"], null) == "false"
      && toset(statement.Resource) == toset([aws_s3_bucket.runs.arn, "${aws_s3_bucket.runs.arn}/*"])
    ])
    error_message = "Requests without TLS must be refused, for the bucket and all in it."
  }
}

run "unfinished_uploads_are_given_up_but_not_too_soon" {
  assert {
    condition = anytrue([
      for rule in aws_s3_bucket_lifecycle_configuration.runs.rule :
      rule.status == "Enabled" && try(rule.abort_incomplete_multipart_upload[0].days_after_initiation >= 2, false)
    ])
    error_message = "Parts of unfinished uploads are billed for ever unless a rule gives them up, after two days or more."
  }
}

run "old_runs_expire" {
  assert {
    condition = anytrue([
      for rule in aws_s3_bucket_lifecycle_configuration.runs.rule :
      rule.status == "Enabled" && try(rule.expiration[0].days == 90, false)
    ])
    error_message = "Runs must expire after expire_days."
  }
}

run "nothing_expires_when_told_so" {
  variables {
    expire_days = 0
  }

  assert {
    condition     = length([for rule in aws_s3_bucket_lifecycle_configuration.runs.rule : rule if length(rule.expiration) > 0 && rule.status == "Enabled"]) == 0
    error_message = "expire_days = 0 must keep all."
  }
}

run "sse_s3_by_default" {
  assert {
    condition     = one(one(aws_s3_bucket_server_side_encryption_configuration.runs.rule).apply_server_side_encryption_by_default).sse_algorithm == "AES256"
    error_message = "Without a key of one's own, SSE-S3."
  }
}

run "kms_with_a_bucket_key" {
  variables {
    kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555"
  }

  assert {
    condition = (
      one(one(aws_s3_bucket_server_side_encryption_configuration.runs.rule).apply_server_side_encryption_by_default).sse_algorithm == "aws:kms"
      && one(aws_s3_bucket_server_side_encryption_configuration.runs.rule).bucket_key_enabled
    )
    error_message = "With a key: SSE-KMS, and the bucket key, or each part costs a request to KMS."
  }
}

run "no_file_system_unless_asked_for" {
  assert {
    condition     = length(aws_efs_file_system.this) == 0 && length(aws_security_group.efs) == 0
    error_message = "EFS costs money: only with efs = true."
  }
}

run "efs_is_encrypted_elastic_and_for_nodes_only" {
  variables {
    efs                      = true
    run_folder               = "/gpt/one"
    vpc_id                   = "vpc-1"
    subnets                  = { "eu-central-1a" = "subnet-a" }
    client_security_group_id = "sg-nodes"
  }

  assert {
    condition     = aws_efs_file_system.this[0].encrypted && aws_efs_file_system.this[0].throughput_mode == "elastic"
    error_message = "Encrypted, and with throughput that does not depend on what is stored."
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.efs[0].referenced_security_group_id == "sg-nodes" && aws_vpc_security_group_ingress_rule.efs[0].from_port == 2049 && aws_vpc_security_group_ingress_rule.efs[0].to_port == 2049
    error_message = "NFS from the nodes and nothing else."
  }

  assert {
    condition     = aws_efs_mount_target.zone["eu-central-1a"].subnet_id == "subnet-a"
    error_message = "The stager's zone needs a mount target."
  }

  assert {
    condition     = { for statement in jsondecode(aws_efs_file_system_policy.this[0].policy).Statement : statement.Sid => [statement.Effect, jsonencode(statement.Condition)] } == { TlsOnly = ["Deny", jsonencode({ Bool = { "aws:SecureTransport" = "false" } })], AccessPointOnly = ["Deny", jsonencode({ Null = { "elasticfilesystem:AccessPointArn" = "true" } })] }
    error_message = "The file system's policy must allow nothing by itself, and refuse what is not TLS or comes without an access point."
  }

  assert {
    condition     = aws_efs_access_point.run[0].root_directory[0].path == "/gpt/one" && aws_efs_access_point.run[0].root_directory[0].creation_info[0].permissions == "0750"
    error_message = "The access point shows the run's folder only."
  }
}

run "one_day_is_too_short_for_uploads" {
  command = plan

  variables {
    abort_multipart_days = 1
  }

  expect_failures = [var.abort_multipart_days]
}

run "a_run_survives_a_weeks_pause" {
  command = plan

  variables {
    expire_days = 3
  }

  expect_failures = [var.expire_days]
}

run "no_dots_in_the_name" {
  command = plan

  variables {
    bucket_name = "my.bucket"
  }

  expect_failures = [var.bucket_name]
}

run "efs_wants_its_network" {
  command = plan

  variables {
    efs = true
  }

  expect_failures = [var.run_folder, var.vpc_id, var.subnets, var.client_security_group_id]
}
