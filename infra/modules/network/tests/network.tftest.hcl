mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name               = "gpt-one"
  availability_zones = ["eu-central-1a", "eu-central-1b"]
  bucket_arn         = "arn:aws:s3:::runs"
}

run "nobody_outside_reaches_a_node" {
  assert {
    condition     = aws_vpc_security_group_ingress_rule.members.referenced_security_group_id == aws_security_group.cluster.id
    error_message = "Nodes must be reached by members of their own group."
  }

  assert {
    condition     = aws_vpc_security_group_ingress_rule.members.cidr_ipv4 == null && aws_vpc_security_group_ingress_rule.members.cidr_ipv6 == null
    error_message = "A rule for addresses lets in whoever has one."
  }

  assert {
    condition     = alltrue([for subnet in aws_subnet.private : !subnet.map_public_ip_on_launch])
    error_message = "Nodes must have no public address."
  }

  assert {
    condition     = length(aws_default_security_group.none.ingress) == 0 && length(aws_default_security_group.none.egress) == 0
    error_message = "The VPC's own default group must let nothing through."
  }
}

run "members_talk_in_both_directions_on_all_ports" {
  assert {
    condition     = aws_vpc_security_group_ingress_rule.members.ip_protocol == "-1" && aws_vpc_security_group_egress_rule.members.ip_protocol == "-1"
    error_message = "MPI takes ports as it likes; EFA demands the pair of rules."
  }

  assert {
    condition     = aws_vpc_security_group_egress_rule.members.referenced_security_group_id == aws_security_group.cluster.id
    error_message = "The outgoing rule must name the group itself."
  }

  assert {
    condition     = aws_placement_group.cluster.strategy == "cluster"
    error_message = "Outside a cluster placement group one TCP flow has 5 Gbit/s."
  }
}

run "s3_goes_through_the_endpoint_from_every_route_table" {
  assert {
    condition     = toset(aws_vpc_endpoint.s3.route_table_ids) == toset([aws_route_table.private.id, aws_route_table.public[0].id])
    error_message = "A route table without the endpoint sends checkpoints through the NAT gateway."
  }

  assert {
    condition     = aws_vpc_endpoint.s3.vpc_endpoint_type == "Gateway"
    error_message = "The gateway endpoint is the one that costs nothing."
  }
}

run "the_endpoint_leads_to_our_bucket_and_the_packages_only" {
  assert {
    condition = toset(flatten([for statement in jsondecode(aws_vpc_endpoint.s3.policy).Statement : statement.Resource])) == toset([
      "arn:aws:s3:::runs",
      "arn:aws:s3:::runs/*",
      "arn:aws:s3:::al2023-repos-eu-central-1-de612dc2/*",
    ])
    error_message = "Another bucket is a way out for checkpoints."
  }

  assert {
    condition     = !anytrue([for statement in jsondecode(aws_vpc_endpoint.s3.policy).Statement : anytrue([for action in statement.Action : strcontains(action, "*")])])
    error_message = "The endpoint's actions must be named one by one."
  }
}

run "without_internet_only_services_are_reached" {
  variables {
    internet = "none"
  }

  assert {
    condition     = length(aws_nat_gateway.this) == 0 && length(aws_internet_gateway.this) == 0 && length(aws_vpc_security_group_egress_rule.internet) == 0
    error_message = "internet = none must leave no way out."
  }

  assert {
    condition     = toset(keys(aws_vpc_endpoint.service)) == toset(["ec2", "ec2messages", "ssm", "ssmmessages", "sts"])
    error_message = "Session Manager and the launcher on the stager need these."
  }
}

run "zones_are_named_not_regions" {
  command = plan

  variables {
    availability_zones = ["eu-central-1"]
  }

  expect_failures = [var.availability_zones]
}

run "one_bucket_not_a_wildcard" {
  command = plan

  variables {
    bucket_arn = "arn:aws:s3:::*"
  }

  expect_failures = [var.bucket_arn]
}

run "a_network_that_holds_sixteen_subnets" {
  command = plan

  variables {
    cidr_block = "10.0.0.0/27"
  }

  expect_failures = [var.cidr_block]
}
