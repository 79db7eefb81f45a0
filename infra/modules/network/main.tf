# Where a cluster lives: a VPC with one private subnet for each availability zone, a way to S3 that costs nothing and leads
# to our bucket only, and one security group whose members reach each other and nobody reaches from outside.
#
#   private subnets ──► S3 gateway endpoint ──► our bucket
#                  └──► NAT gateway ──► internet (out only), or with internet = "none" ──► interface endpoints (SSM, EC2, STS)

data "aws_region" "current" {}

data "aws_partition" "current" {}

locals {
  has_nat = var.internet == "nat"

  # Without a NAT gateway these are the only services of AWS that a node reaches besides S3.
  interface_services = local.has_nat ? [] : ["ec2", "ec2messages", "ssm", "ssmmessages", "sts"]

  # Amazon Linux has its packages in this bucket of each region; an endpoint policy that leaves it out breaks dnf.
  package_bucket_arn = "arn:${data.aws_partition.current.partition}:s3:::al2023-repos-${data.aws_region.current.region}-de612dc2"

  route_table_ids = concat([aws_route_table.private.id], aws_route_table.public[*].id)
}

resource "aws_vpc" "this" {
  #checkov:skip=CKV2_AWS_11:flow logs are billed by volume; an organisation that wants them sets them on the VPC id of the output
  cidr_block           = var.cidr_block
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = merge(var.tags, { Name = var.name })
}

# Terraform takes over the group that AWS makes with each VPC, and leaves it without a single rule.
resource "aws_default_security_group" "none" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-unused" })
}

resource "aws_subnet" "private" {
  for_each = { for index, zone in var.availability_zones : zone => index }

  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.cidr_block, 4, each.value + 1)
  map_public_ip_on_launch = false
  tags                    = merge(var.tags, { Name = "${var.name}-${each.key}" })
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-private" })
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private.id
}

# -- the way out, without a way in -------------------------------------------------------------------------------

resource "aws_internet_gateway" "this" {
  count = local.has_nat ? 1 : 0

  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = var.name })
}

resource "aws_subnet" "public" {
  count = local.has_nat ? 1 : 0

  vpc_id                  = aws_vpc.this.id
  availability_zone       = var.availability_zones[0]
  cidr_block              = cidrsubnet(var.cidr_block, 4, 0)
  map_public_ip_on_launch = false
  tags                    = merge(var.tags, { Name = "${var.name}-nat" })
}

resource "aws_route_table" "public" {
  count = local.has_nat ? 1 : 0

  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-nat" })
}

resource "aws_route" "public" {
  count = local.has_nat ? 1 : 0

  route_table_id         = aws_route_table.public[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_route_table_association" "public" {
  count = local.has_nat ? 1 : 0

  subnet_id      = aws_subnet.public[0].id
  route_table_id = aws_route_table.public[0].id
}

resource "aws_eip" "nat" {
  #checkov:skip=CKV2_AWS_19:this address belongs to the NAT gateway below, which the check does not count as attached
  count = local.has_nat ? 1 : 0

  domain = "vpc"
  tags   = merge(var.tags, { Name = "${var.name}-nat" })
}

resource "aws_nat_gateway" "this" {
  count = local.has_nat ? 1 : 0

  subnet_id     = aws_subnet.public[0].id
  allocation_id = aws_eip.nat[0].id
  tags          = merge(var.tags, { Name = var.name })

  depends_on = [aws_route.public]
}

resource "aws_route" "private" {
  count = local.has_nat ? 1 : 0

  route_table_id         = aws_route_table.private.id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[0].id
}

# -- S3 and the services of AWS ----------------------------------------------------------------------------------

# On every route table: a table left out sends checkpoints through the NAT gateway, which bills each gigabyte.
resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  service_name      = "com.amazonaws.${data.aws_region.current.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = local.route_table_ids
  tags              = merge(var.tags, { Name = "${var.name}-s3" })

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "OurBucket"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:ListBucket", "s3:ListBucketMultipartUploads"]
        Resource  = [var.bucket_arn]
      },
      {
        Sid       = "OurObjects"
        Effect    = "Allow"
        Principal = "*"
        Action = [
          "s3:AbortMultipartUpload",
          "s3:DeleteObject",
          "s3:GetObject",
          "s3:ListMultipartUploadParts",
          "s3:PutObject",
        ]
        Resource = ["${var.bucket_arn}/*"]
      },
      {
        Sid       = "PackagesOfTheSystem"
        Effect    = "Allow"
        Principal = "*"
        Action    = ["s3:GetObject"]
        Resource  = ["${local.package_bucket_arn}/*"]
      },
    ]
  })
}

resource "aws_security_group" "endpoints" {
  #checkov:skip=CKV2_AWS_5:it is attached to the interface endpoints below
  count = local.has_nat ? 0 : 1

  name        = "${var.name}-endpoints"
  description = "Interface endpoints of the VPC: HTTPS from the cluster"
  vpc_id      = aws_vpc.this.id
  tags        = merge(var.tags, { Name = "${var.name}-endpoints" })
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  count = local.has_nat ? 0 : 1

  security_group_id            = aws_security_group.endpoints[0].id
  description                  = "HTTPS from the cluster"
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  referenced_security_group_id = aws_security_group.cluster.id
}

resource "aws_vpc_endpoint" "service" {
  for_each = toset(local.interface_services)

  vpc_id              = aws_vpc.this.id
  service_name        = "com.amazonaws.${data.aws_region.current.region}.${each.key}"
  vpc_endpoint_type   = "Interface"
  private_dns_enabled = true
  subnet_ids          = [aws_subnet.private[var.availability_zones[0]].id]
  security_group_ids  = [aws_security_group.endpoints[0].id]
  tags                = merge(var.tags, { Name = "${var.name}-${each.key}" })
}

# -- who may talk to whom ----------------------------------------------------------------------------------------

resource "aws_security_group" "cluster" {
  #checkov:skip=CKV2_AWS_5:launch templates of other modules attach it
  name        = "${var.name}-cluster"
  description = "Nodes of a holdfast cluster: all traffic among themselves, none from outside"
  vpc_id      = aws_vpc.this.id
  tags        = merge(var.tags, { Name = "${var.name}-cluster" })
}

# All protocols in both directions: MPI takes ports as it likes, and EFA demands exactly this pair.
resource "aws_vpc_security_group_ingress_rule" "members" {
  security_group_id            = aws_security_group.cluster.id
  description                  = "Everything from members"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.cluster.id
}

resource "aws_vpc_security_group_egress_rule" "members" {
  security_group_id            = aws_security_group.cluster.id
  description                  = "Everything to members"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.cluster.id
}

resource "aws_vpc_security_group_egress_rule" "s3" {
  security_group_id = aws_security_group.cluster.id
  description       = "HTTPS to S3 through the gateway endpoint"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  prefix_list_id    = aws_vpc_endpoint.s3.prefix_list_id
}

resource "aws_vpc_security_group_egress_rule" "internet" {
  count = local.has_nat ? 1 : 0

  security_group_id = aws_security_group.cluster.id
  description       = "HTTPS out: Session Manager, the API of EC2, Python packages"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = "0.0.0.0/0"
}

resource "aws_vpc_security_group_egress_rule" "endpoints" {
  count = local.has_nat ? 0 : 1

  security_group_id            = aws_security_group.cluster.id
  description                  = "HTTPS to the interface endpoints"
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  referenced_security_group_id = aws_security_group.endpoints[0].id
}

# Stager and trainers share it: one TCP flow moves 10 Gbit/s within a cluster placement group, 5 outside.
resource "aws_placement_group" "cluster" {
  name     = "${var.name}-cluster"
  strategy = "cluster"
  tags     = var.tags
}
