output "vpc_id" {
  description = "The VPC."
  value       = aws_vpc.this.id
}

output "subnet_id" {
  description = "The private subnet of the first availability zone: stager and trainers."
  value       = aws_subnet.private[var.availability_zones[0]].id
}

output "subnets" {
  description = "Private subnets by availability zone."
  value       = { for zone, subnet in aws_subnet.private : zone => subnet.id }
}

output "subnet_arns" {
  description = "ARNs of the private subnets, for the operator's policy."
  value       = [for subnet in aws_subnet.private : subnet.arn]
}

output "security_group_id" {
  description = "The group of all nodes."
  value       = aws_security_group.cluster.id
}

output "security_group_arn" {
  description = "ARN of the group of all nodes, for the operator's policy."
  value       = aws_security_group.cluster.arn
}

output "placement_group" {
  description = "Name of the cluster placement group."
  value       = aws_placement_group.cluster.name
}

output "placement_group_arn" {
  description = "ARN of the cluster placement group, for the operator's policy."
  value       = aws_placement_group.cluster.arn
}
