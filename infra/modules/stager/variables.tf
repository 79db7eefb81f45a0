variable "name" {
  description = "Prefix of all names."
  type        = string
}

variable "project" {
  description = "First part of the run's prefix in the bucket, and the tag Project."
  type        = string
}

variable "run_id" {
  description = "Second part of the run's prefix in the bucket, and the tag RunId."
  type        = string
}

variable "bucket" {
  description = "Bucket with the runs."
  type        = string
}

variable "bucket_arn" {
  description = "ARN of the bucket with the runs."
  type        = string

  validation {
    condition     = can(regex("^arn:[a-z-]+:s3:::[^/*]+$", var.bucket_arn))
    error_message = "bucket_arn: expected the ARN of one bucket, arn:aws:s3:::NAME, without a path or a wildcard; got \"${var.bucket_arn}\"."
  }
}

variable "kms_key_arn" {
  description = "KMS key of the bucket; null with SSE-S3."
  type        = string
  default     = null
}

variable "efs" {
  description = "File system that is the store, and the access point of this run; null: the store is the bucket."
  type        = object({ id = string, arn = string, access_point_id = string, access_point_arn = string })
  default     = null
}

variable "security_group_id" {
  description = "Security group of all nodes."
  type        = string
}

variable "placement_group" {
  description = "Cluster placement group; null: none."
  type        = string
  default     = null
}

variable "ami_id" {
  description = "Image to boot; null: the one that ami_ssm_parameter names at the first apply."
  type        = string
  default     = null
}

variable "ami_ssm_parameter" {
  description = "Public SSM parameter that names the image. Its architecture must be that of the instance types."
  type        = string
  default     = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
}

variable "root_device_name" {
  description = "Name of the image's root device: /dev/xvda for Amazon Linux, /dev/sda1 for Ubuntu."
  type        = string
  default     = "/dev/xvda"
}

variable "root_volume_gib" {
  description = "Size of the root disk, in GiB."
  type        = number
  default     = 64
}

variable "imds_hop_limit" {
  description = "How many network hops an answer of the metadata service may take: 1, or 2 where ranks run in containers."
  type        = number
  default     = 1
}

variable "settings" {
  description = "Settings of holdfast on the node, by their names in lower case."
  type        = map(string)
  default     = {}
}

variable "tags" {
  description = "Tags of everything that is made here."
  type        = map(string)
  default     = {}
}

variable "holdfast_package" {
  description = "What pip installs on the stager: a requirement with the place of your own wheel or repository (`@ URL`). The same version as on the trainers."
  type        = string
}

variable "instance_type" {
  description = "Type of the stager. Its sustained network decides PGT-1, its memory the ring: network-sized types (n), never burstable (t)."
  type        = string
  default     = "c6in.4xlarge"

  validation {
    condition     = !startswith(var.instance_type, "t")
    error_message = "instance_type: expected a type with sustained network, such as c6in.4xlarge; \"${var.instance_type}\" is burstable, and every checkpoint would empty its credits."
  }
}

variable "ring_bytes" {
  description = "Memory for the ring on the stager, such as \"16GiB\"; at most half of the instance's, since it lies in /dev/shm."
  type        = string
  default     = "8GiB"

  validation {
    condition     = can(regex("^[0-9]+(MiB|GiB)$", var.ring_bytes))
    error_message = "ring_bytes: expected a size such as 16GiB; got \"${var.ring_bytes}\"."
  }
}

variable "operator_role_arn" {
  description = "Role that the stager may assume, to raise trainers again after a preemption; null: it may not."
  type        = string
  default     = null

  validation {
    condition     = var.operator_role_arn == null || can(regex("^arn:[a-z-]+:iam::[0-9]{12}:role/.+$", var.operator_role_arn))
    error_message = "operator_role_arn: expected the ARN of a role; got \"${coalesce(var.operator_role_arn, "null")}\"."
  }
}
