variable "name" {
  description = "Prefix of all names."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,40}$", var.name))
    error_message = "name: expected 2 to 41 lower-case letters, digits and dashes, beginning with a letter; got \"${var.name}\"."
  }
}

variable "cidr_block" {
  description = "Addresses of the VPC, /16 to /20; each subnet gets a sixteenth of them."
  type        = string
  default     = "10.42.0.0/16"

  validation {
    condition     = can(cidrhost(var.cidr_block, 0)) && try(tonumber(split("/", var.cidr_block)[1]) >= 16 && tonumber(split("/", var.cidr_block)[1]) <= 20, false)
    error_message = "cidr_block: expected an IPv4 network of /16 to /20, such as 10.42.0.0/16; got \"${var.cidr_block}\"."
  }
}

variable "availability_zones" {
  description = "Zones with a subnet. The first one holds stager and trainers; the others are for the launcher to fall back to."
  type        = list(string)

  validation {
    condition     = length(var.availability_zones) >= 1 && length(var.availability_zones) <= 8 && length(distinct(var.availability_zones)) == length(var.availability_zones)
    error_message = "availability_zones: expected 1 to 8 different zones; got ${jsonencode(var.availability_zones)}."
  }

  validation {
    condition     = alltrue([for zone in var.availability_zones : can(regex("^[a-z]{2}(-[a-z]+)+-[0-9][a-z]$", zone))])
    error_message = "availability_zones: expected names such as eu-central-1a, not regions nor zone ids; got ${jsonencode(var.availability_zones)}."
  }
}

variable "internet" {
  description = "The nodes' way out: \"nat\" (a NAT gateway; nodes may install packages) or \"none\" (endpoints only; the image must hold all)."
  type        = string
  default     = "nat"

  validation {
    condition     = contains(["nat", "none"], var.internet)
    error_message = "internet: expected \"nat\" or \"none\"; got \"${var.internet}\"."
  }
}

variable "bucket_arn" {
  description = "ARN of the bucket with the runs: the only one that the S3 endpoint leads to, besides the system's packages."
  type        = string

  validation {
    condition     = can(regex("^arn:[a-z-]+:s3:::[^/*]+$", var.bucket_arn))
    error_message = "bucket_arn: expected the ARN of one bucket, arn:aws:s3:::NAME, without a path or a wildcard; got \"${var.bucket_arn}\"."
  }
}

variable "tags" {
  description = "Tags of everything that is made here."
  type        = map(string)
  default     = {}
}
