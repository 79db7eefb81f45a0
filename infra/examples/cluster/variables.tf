variable "region" {
  description = "Region of AWS."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "region: expected a region such as eu-central-1, not a zone; got \"${var.region}\"."
  }
}

variable "availability_zones" {
  description = "Zones of the region with a subnet each. Stager and trainers are in the first; the others are to fall back to."
  type        = list(string)

  validation {
    condition     = alltrue([for zone in var.availability_zones : startswith(zone, var.region)])
    error_message = "availability_zones: expected zones of ${var.region}; got ${jsonencode(var.availability_zones)}."
  }
}

variable "project" {
  description = "Name of the project: first part of the run's prefix in the bucket, and the tag Project."
  type        = string

  validation {
    condition     = can(regex("^[a-zA-Z][a-zA-Z0-9._-]{0,18}$", var.project))
    error_message = "project: expected 1 to 19 letters, digits, dots and dashes, beginning with a letter; got \"${var.project}\"."
  }
}

variable "run_id" {
  description = "Name of the run: second part of the prefix, and the tag RunId. A new run takes a new one."
  type        = string

  validation {
    condition     = can(regex("^[a-zA-Z0-9][a-zA-Z0-9._-]{0,18}$", var.run_id))
    error_message = "run_id: expected 1 to 19 letters, digits, dots and dashes, beginning with a letter or digit; got \"${var.run_id}\"."
  }
}

variable "bucket_name" {
  description = "Name of the bucket; null: made of project, account and region."
  type        = string
  default     = null
}

variable "efs" {
  description = "Make a file system (EFS) and use it as the store; false: the bucket is the store."
  type        = bool
  default     = false
}

variable "kms_key_arn" {
  description = "KMS key for bucket and file system; null: SSE-S3, and the key of EFS itself."
  type        = string
  default     = null
}

variable "cidr_block" {
  description = "Addresses of the VPC."
  type        = string
  default     = "10.42.0.0/16"
}

variable "expire_days" {
  description = "Age at which objects in the bucket are removed, in days; 0 keeps all. On EFS only the retention of the run (keep_last) removes checkpoints."
  type        = number
  default     = 90
}

variable "force_destroy" {
  description = "Let `terraform destroy` remove the bucket with all checkpoints in it."
  type        = bool
  default     = false
}

variable "trainer_instance_types" {
  description = "Types that a trainer may have; several similar ones make capacity likelier."
  type        = list(string)
  default     = ["g6.2xlarge", "g6.4xlarge", "g5.2xlarge", "g5.4xlarge"]
}

variable "trainer_ami_ssm_parameter" {
  description = "Public SSM parameter that names the trainers' image; it must have the driver of the GPU."
  type        = string
  default     = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"
}

variable "trainer_package" {
  description = "What pip installs on a trainer: a requirement with the place of your own wheel or repository (`@ URL`)."
  type        = string
}

variable "stager_instance_type" {
  description = "Type of the stager: sustained network, and memory for twice the ring."
  type        = string
  default     = "c6in.4xlarge"
}

variable "stager_package" {
  description = "What pip installs on the stager; the same version as on the trainers."
  type        = string
}

variable "ring_bytes" {
  description = "Memory for the ring on the stager, such as \"16GiB\"."
  type        = string
  default     = "8GiB"
}

variable "operator_arns" {
  description = "Users or roles that may raise and end the cluster. Empty: whoever in the account has sts:AssumeRole on the operator's role."
  type        = list(string)
  default     = []
}

variable "stager_relaunches" {
  description = "Let the stager take the operator's role, to raise trainers again after a preemption while nobody watches."
  type        = bool
  default     = true
}

variable "interruption_drill" {
  description = "Make experiment templates of AWS FIS that interrupt trainers as the spot market does."
  type        = bool
  default     = false
}

variable "tags" {
  description = "More tags for everything that is made."
  type        = map(string)
  default     = {}
}
