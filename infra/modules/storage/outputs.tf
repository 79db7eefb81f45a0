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

output "efs" {
  description = "The file system and the run's access point to it, { id, arn, access_point_id, access_point_arn }; null without one."
  value = var.efs ? {
    id               = aws_efs_file_system.this[0].id
    arn              = aws_efs_file_system.this[0].arn
    access_point_id  = aws_efs_access_point.run[0].id
    access_point_arn = aws_efs_access_point.run[0].arn
  } : null
}
