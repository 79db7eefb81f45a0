variable "name" {
  description = "Prefix of all names."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,40}$", var.name))
    error_message = "name: expected 2 to 41 lower-case letters, digits and dashes, beginning with a letter; got \"${var.name}\"."
  }
}

variable "bucket_name" {
  description = "Name of the bucket; unique in all of AWS."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket_name))
    error_message = "bucket_name: expected 3 to 63 lower-case letters, digits and dashes (a dot breaks TLS to S3); got \"${var.bucket_name}\"."
  }
}

variable "kms_key_arn" {
  description = "KMS key for bucket and file system; null: SSE-S3, and EFS's own key."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/.+$", var.kms_key_arn))
    error_message = "kms_key_arn: expected the ARN of a key (not of an alias), arn:aws:kms:REGION:ACCOUNT:key/ID; got \"${coalesce(var.kms_key_arn, "null")}\"."
  }
}

variable "versioning" {
  description = "Keep what was overwritten or deleted for noncurrent_days; pruned checkpoints then go on costing for so long."
  type        = bool
  default     = false
}

variable "noncurrent_days" {
  description = "How long versioning keeps what was overwritten or deleted, in days."
  type        = number
  default     = 7

  validation {
    condition     = var.noncurrent_days >= 1 && floor(var.noncurrent_days) == var.noncurrent_days
    error_message = "noncurrent_days: expected a whole number of days, 1 or more; got ${var.noncurrent_days}."
  }
}

variable "expire_days" {
  description = "Age at which a checkpoint is removed, in days; 0 keeps all. Longer than any pause of a run that is to go on."
  type        = number
  default     = 90

  validation {
    condition     = (var.expire_days == 0 || var.expire_days >= 7) && floor(var.expire_days) == var.expire_days
    error_message = "expire_days: expected 0 (keep all) or a whole number of days, 7 or more, so that a run survives a week's pause; got ${var.expire_days}."
  }
}

variable "abort_multipart_days" {
  description = "Age at which an unfinished upload is given up, in days. The flusher resumes uploads, so this must be longer than any outage to survive."
  type        = number
  default     = 3

  validation {
    condition     = var.abort_multipart_days >= 2 && floor(var.abort_multipart_days) == var.abort_multipart_days
    error_message = "abort_multipart_days: expected a whole number of days, 2 or more, so that no flush is cut off; got ${var.abort_multipart_days}."
  }
}

variable "force_destroy" {
  description = "Let `terraform destroy` remove the bucket with all checkpoints in it."
  type        = bool
  default     = false
}

variable "efs" {
  description = "Make a file system as well."
  type        = bool
  default     = false
}

variable "run_folder" {
  description = "Folder of the run on the file system, such as /gpt/one; needed with efs. Nodes of the run see nothing else of it."
  type        = string
  default     = null

  validation {
    condition     = !var.efs || can(regex("^(/[a-zA-Z0-9][a-zA-Z0-9._-]*){2}$", var.run_folder))
    error_message = "run_folder: expected /project/run_id, since efs is true; got \"${coalesce(var.run_folder, "null")}\"."
  }
}

variable "vpc_id" {
  description = "VPC of the file system; needed with efs."
  type        = string
  default     = null

  validation {
    condition     = !var.efs || var.vpc_id != null
    error_message = "vpc_id: expected the id of a VPC, since efs is true; got null."
  }
}

variable "subnets" {
  description = "Subnets by availability zone: each gets a mount target; needed with efs."
  type        = map(string)
  default     = {}

  validation {
    condition     = !var.efs || length(var.subnets) > 0
    error_message = "subnets: expected at least one, since efs is true: a file system without a mount target cannot be mounted."
  }
}

variable "client_security_group_id" {
  description = "Security group of the nodes that mount the file system; needed with efs."
  type        = string
  default     = null

  validation {
    condition     = !var.efs || var.client_security_group_id != null
    error_message = "client_security_group_id: expected the id of the nodes' security group, since efs is true; got null."
  }
}

variable "tags" {
  description = "Tags of everything that is made here."
  type        = map(string)
  default     = {}
}
