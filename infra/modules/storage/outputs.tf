output "bucket" {
  description = "Name of the bucket."
  value       = aws_s3_bucket.runs.bucket
}

# By its name and not by the resource: the network's endpoint wants it before the file system, which wants the network.
output "bucket_arn" {
  description = "ARN of the bucket."
  value       = "arn:${data.aws_partition.current.partition}:s3:::${aws_s3_bucket.runs.bucket}"
}

output "kms_key_arn" {
  description = "Key of the bucket; null with SSE-S3."
  value       = var.kms_key_arn
}

output "efs_id" {
  description = "Id of the file system; null without one."
  value       = one(aws_efs_file_system.this[*].id)
}

output "efs_arn" {
  description = "ARN of the file system; null without one."
  value       = one(aws_efs_file_system.this[*].arn)
}
