output "role_arn" {
  description = "ARN of the operator's role."
  value       = aws_iam_role.operator.arn
}

output "policy" {
  description = "What the operator may do, as JSON."
  value       = aws_iam_role_policy.operator.policy
}
