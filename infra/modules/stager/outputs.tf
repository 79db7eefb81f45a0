output "launch_template" {
  description = "Id and version of the stager's launch template."
  value       = module.node.launch_template
}

output "launch_template_arn" {
  description = "ARN of the stager's launch template, for the operator's policy."
  value       = module.node.launch_template_arn
}

output "role_arn" {
  description = "ARN of the stager's role: what the operator may pass."
  value       = module.node.role_arn
}

output "profile_arn" {
  description = "ARN of the stager's instance profile."
  value       = module.node.profile_arn
}

output "ami_id" {
  description = "The stager's image, as pinned in the state."
  value       = module.node.ami_id
}

output "user_data" {
  description = "The stager's user data as it reaches cloud-init."
  value       = module.node.user_data
}

output "instance_type" {
  description = "Type of the stager."
  value       = var.instance_type
}

output "store_url" {
  description = "The run's store, as `--store` takes it."
  value       = "${module.node.store_root}/${var.run_id}/checkpoints"
}
