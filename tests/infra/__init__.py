"""infra/ without a cloud: real Terraform on the provider's schema, rendered policies, user data that is run."""
