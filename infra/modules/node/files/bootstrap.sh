#!/bin/bash
# Makes this machine a node of a holdfast cluster: user, environment, store settings, file system, services.
# May run any number of times: every step looks first whether it is done. cloud-init runs it at the first boot; run it again
# after whatever went wrong is mended: sudo /usr/local/sbin/holdfast-bootstrap
#
#   node.env (from Terraform) + instance tags ──► user holdfast ──► /opt/holdfast/venv ──► environment ──► units
set -euo pipefail

# shellcheck disable=SC1091 # written by cloud-init beside this script
. /etc/holdfast/node.env

readonly home=/var/lib/holdfast venv=/opt/holdfast/venv
readonly imds=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}
readonly user_id=873 # the same on all nodes, for files on EFS; below 1000, so that logind's RemoveIPC spares the ring

say() { echo "holdfast-bootstrap: $*"; }

fail() {
  echo "holdfast-bootstrap: $*" >&2
  exit 1
}

# What the metadata service (IMDSv2) says at the path $1.
metadata() {
  local token
  token=$(curl -sSf --retry 5 --retry-connrefused -m 10 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' "${imds%/}/latest/api/token")
  curl -sSf --retry 5 -m 10 -H "X-aws-ec2-metadata-token: $token" "${imds%/}/latest/meta-data/$1"
}

# Write stdin to the file $1 with mode $2, whole or not at all; true if that changed anything.
put() {
  local temporary
  temporary=$(mktemp "$1.XXXXXX")
  cat >"$temporary"
  chmod "$2" "$temporary"
  if cmp -s "$temporary" "$1"; then
    rm "$temporary"
    return 1
  fi
  mv "$temporary" "$1"
}

install_packages() {
  say "installing $*"
  if command -v dnf >/dev/null; then
    dnf -q -y install "$@"
  elif command -v apt-get >/dev/null; then
    DEBIAN_FRONTEND=noninteractive apt-get -q -y -o DPkg::Lock::Timeout=300 install "$@"
  else
    fail "$* missing, and neither dnf nor apt-get is here to install it; use an image that has it"
  fi
}

find_python() {
  local candidate
  for candidate in python3.13 python3.12 python3.11 python3; do
    if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

make_user() {
  if ! getent passwd holdfast >/dev/null; then
    say "making the user holdfast"
    useradd --system --uid "$user_id" --user-group --home-dir "$home" --shell /bin/bash holdfast
  fi
  install -d -m 0750 -o holdfast -g holdfast "$home"
  install -d -m 0700 -o holdfast -g holdfast "$home/.ssh"
}

make_environment() {
  local python
  if ! python=$(find_python); then
    install_packages python3.11 python3.11-pip
    python=$(find_python) || fail "no Python 3.11 or newer with venv; use an image that has one"
  fi
  if [ ! -x "$venv/bin/python" ]; then
    say "making $venv with $python"
    rm -rf "$venv.new"
    install -d "${venv%/*}"
    "$python" -m venv "$venv.new"
    mv "$venv.new" "$venv"
  fi
  # The stamp says what is installed, and is written last: an interrupted installation is done again.
  if [ "$(cat "$venv/holdfast-package" 2>/dev/null || true)" != "$HOLDFAST_PACKAGE" ]; then
    say "installing $HOLDFAST_PACKAGE"
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --upgrade "$HOLDFAST_PACKAGE"
    echo "$HOLDFAST_PACKAGE" >"$venv/holdfast-package"
  fi
}

write_settings() {
  local run_id
  run_id=$(metadata tags/instance/RunId) || fail "no tag RunId at ${imds}: the launch template must say instance_metadata_tags = enabled"
  case $run_id in
  *[!a-zA-Z0-9._-]* | '') fail "the tag RunId is \"$run_id\": expected letters, digits, dots, dashes" ;;
  esac
  if put /etc/holdfast/environment 0644 <<END; then
HOLDFAST_STORE=$HOLDFAST_STORE_ROOT/$run_id/checkpoints
HOLDFAST_CLUSTER_URL=s3://$HOLDFAST_BUCKET/$HOLDFAST_PROJECT/$run_id/cluster
AWS_DEFAULT_REGION=$HOLDFAST_REGION
$(cat /etc/holdfast/settings.env)
END
    say "settings of run $run_id written"
  fi
}

# The access point shows the run's folder and nothing else; EFS makes the folder, for the user holdfast, at the first mount.
mount_file_system() {
  [ -n "$HOLDFAST_EFS_ID" ] || return 0
  local options=_netdev,noresvport,tls,iam,accesspoint=$HOLDFAST_EFS_ACCESS_POINT
  [ "$HOLDFAST_ROLE" = stager ] || options=$options,ro
  command -v mount.efs >/dev/null || install_packages amazon-efs-utils
  install -d "$HOLDFAST_EFS_PATH"
  if ! grep -q "^$HOLDFAST_EFS_ID:/ " /etc/fstab; then
    echo "$HOLDFAST_EFS_ID:/ $HOLDFAST_EFS_PATH efs $options 0 0" >>/etc/fstab
  fi
  mountpoint -q "$HOLDFAST_EFS_PATH" || mount "$HOLDFAST_EFS_PATH"
}

start_services() {
  systemctl daemon-reload
  local unit
  for unit in $HOLDFAST_UNITS; do
    systemctl enable --quiet --now "$unit"
  done
}

write_settings # first: a wrong tag is found before anything is made
make_user
make_environment
mount_file_system
start_services
say "this node is ready: role $HOLDFAST_ROLE"
