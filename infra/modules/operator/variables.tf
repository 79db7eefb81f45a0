variable "name" {
  description = "Prefix of all names."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,40}$", var.name))
    error_message = "name: expected 2 to 41 lower-case letters, digits and dashes, beginning with a letter; got \"${var.name}\"."
  }
}

variable "project" {
  description = "The tag Project of what may be raised and ended."
  type        = string
}

variable "run_id" {
  description = "The tag RunId of what may be raised and ended."
  type        = string
}

variable "principal_arns" {
  description = "Who may take this role: users or roles. Empty: whoever in the account has been given sts:AssumeRole on it."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.principal_arns : can(regex("^arn:[a-z-]+:(iam|sts)::[0-9]{12}:[a-z-]+/[^*]+$", arn))])
    error_message = "principal_arns: expected ARNs of users or roles without wildcards; got ${jsonencode(var.principal_arns)}."
  }
}

variable "launch_template_arns" {
  description = "The templates that nodes may be raised from."
  type        = list(string)

  validation {
    condition     = length(var.launch_template_arns) > 0
    error_message = "launch_template_arns: expected at least one; with none the operator could raise nothing."
  }
}

variable "node_role_arns" {
  description = "The roles that may be passed to instances: the trainers' and the stager's."
  type        = list(string)

  validation {
    condition     = length(var.node_role_arns) == 2 && alltrue([for arn in var.node_role_arns : !strcontains(arn, "*")])
    error_message = "node_role_arns: expected exactly two roles, the trainers' and the stager's, without wildcards; got ${jsonencode(var.node_role_arns)}."
  }
}

variable "instance_types" {
  description = "Types that may be raised: a mistake in a command does not rent the largest machine of the region."
  type        = list(string)

  validation {
    condition     = length(var.instance_types) > 0 && alltrue([for type in var.instance_types : !strcontains(type, "*")])
    error_message = "instance_types: expected one or more types without wildcards; got ${jsonencode(var.instance_types)}."
  }
}

variable "ami_ids" {
  description = "Images that may be booted."
  type        = list(string)
}

variable "subnet_arns" {
  description = "Subnets that nodes may be raised in."
  type        = list(string)
}

variable "security_group_arns" {
  description = "Security groups that nodes may have."
  type        = list(string)
}

variable "placement_group_arns" {
  description = "Placement groups that nodes may join."
  type        = list(string)
}

variable "tags" {
  description = "Tags of everything that is made here."
  type        = map(string)
  default     = {}
}
