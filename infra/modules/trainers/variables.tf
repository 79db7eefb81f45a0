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
  description = "What pip installs on a trainer: a requirement with the place of your own wheel or repository (`@ URL`)."
  type        = string
}

variable "instance_types" {
  description = "Types that a trainer may have. Several similar ones make capacity likelier; all of the image's architecture."
  type        = list(string)

  validation {
    condition     = length(var.instance_types) >= 1 && length(distinct(var.instance_types)) == length(var.instance_types)
    error_message = "instance_types: expected one or more different types; got ${jsonencode(var.instance_types)}."
  }

  validation {
    condition     = alltrue([for type in var.instance_types : can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", type))])
    error_message = "instance_types: expected types such as g6.xlarge; got ${jsonencode(var.instance_types)}."
  }
}

variable "spot_in_template" {
  description = "Have the template itself ask for spot, for a plain `aws ec2 run-instances`. EC2 Fleet and Auto Scaling refuse that."
  type        = bool
  default     = false
}

variable "autoscaling" {
  description = "Hold trainers in an Auto Scaling group instead of raising them by the launcher; null: no group. See main.tf for the price."
  type        = object({ subnet_ids = list(string), size = number })
  default     = null

  validation {
    condition     = var.autoscaling == null || try(length(var.autoscaling.subnet_ids) == 1 && var.autoscaling.size >= 0 && var.autoscaling.size <= 512, false)
    error_message = "autoscaling: expected exactly one subnet, since a placement group lies in one zone, and a size of 0 to 512."
  }

  validation {
    condition     = var.autoscaling == null || !var.spot_in_template
    error_message = "autoscaling: expected spot_in_template = false: Auto Scaling refuses a template that itself asks for spot."
  }
}

variable "interruption_drill" {
  description = "Make an experiment template of AWS FIS that interrupts trainers as the spot market does."
  type        = bool
  default     = false
}

variable "drill_notice_minutes" {
  description = "Minutes from notice to interruption in a drill: AWS gives 2."
  type        = number
  default     = 2

  validation {
    condition     = var.drill_notice_minutes >= 2 && var.drill_notice_minutes <= 15 && floor(var.drill_notice_minutes) == var.drill_notice_minutes
    error_message = "drill_notice_minutes: expected 2 to 15 whole minutes, which is what FIS takes; got ${var.drill_notice_minutes}."
  }
}
