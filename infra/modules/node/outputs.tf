output "launch_template" {
  description = "Id and version of the launch template."
  value = {
    id      = aws_launch_template.this.id
    version = tostring(aws_launch_template.this.latest_version)
  }
}

output "launch_template_arn" {
  description = "ARN of the launch template, for the operator's policy."
  value       = aws_launch_template.this.arn
}

output "role_arn" {
  description = "ARN of the node's role: what the operator may pass."
  value       = aws_iam_role.this.arn
}

output "role_name" {
  description = "Name of the node's role."
  value       = aws_iam_role.this.name
}

output "profile_arn" {
  description = "ARN of the instance profile."
  value       = aws_iam_instance_profile.this.arn
}

output "ami_id" {
  description = "The image, as pinned in the state."
  value       = terraform_data.image.output
}

output "store_root" {
  description = "What the run's id is appended to: s3://bucket/project, or a folder of the file system."
  value       = local.store_root
}

output "user_data" {
  description = "The user data as it reaches cloud-init."
  value       = local.user_data
}
