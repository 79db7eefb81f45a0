"""infra/ without a cloud: real Terraform on the provider's schema, policies as rendered, user data run."""
