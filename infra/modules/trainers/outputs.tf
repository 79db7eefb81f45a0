output "launch_template" {
  description = "Id and version of the trainers' launch template."
  value       = module.node.launch_template
}

output "launch_template_arn" {
  description = "ARN of the trainers' launch template, for the operator's policy."
  value       = module.node.launch_template_arn
}

output "role_arn" {
  description = "ARN of the trainers' role: what the operator may pass."
  value       = module.node.role_arn
}

output "profile_arn" {
  description = "ARN of the trainers' instance profile."
  value       = module.node.profile_arn
}

output "ami_id" {
  description = "The trainers' image, as pinned in the state."
  value       = module.node.ami_id
}

output "user_data" {
  description = "The trainers' user data as it reaches cloud-init."
  value       = module.node.user_data
}

output "drills" {
  description = "Ids of the FIS experiment templates: one trainer, all trainers; empty without interruption_drill."
  value       = { for which, template in aws_fis_experiment_template.interruption : which => template.id }
}
