# For `holdfast cluster up --from FILE`, where FILE is what `terraform output -json` says. infra/README.md has the meanings.
output "launcher" {
  description = "All that the launcher needs to raise, find and end the instances of this run."
  value = {
    region            = var.region
    availability_zone = var.availability_zones[0]
    subnet_id         = module.network.subnet_id
    subnets           = module.network.subnets

    security_group_ids = [module.network.security_group_id]
    placement_group    = module.network.placement_group

    trainer_launch_template = module.trainers.launch_template
    trainer_instance_types  = var.trainer_instance_types
    trainer_profile_arn     = module.trainers.profile_arn
    trainer_ami_id          = module.trainers.ami_id

    stager_launch_template = module.stager.launch_template
    stager_instance_type   = module.stager.instance_type
    stager_profile_arn     = module.stager.profile_arn
    stager_ami_id          = module.stager.ami_id

    operator_role_arn = module.operator.role_arn

    bucket     = module.storage.bucket
    run_prefix = "${var.project}/${var.run_id}"
    store_url  = module.stager.store_url
    project    = var.project
    run_id     = var.run_id
    tags       = merge(var.tags, local.run_tags, { ManagedBy = "holdfast" })
  }
}

output "drills" {
  description = "Ids of the FIS experiment templates: one trainer, all trainers; empty without interruption_drill."
  value       = module.trainers.drills
}
