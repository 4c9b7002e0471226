#!/bin/sh
set -eu
d=/opt/nstance-agent; id nstance-agent >/dev/null 2>&1 || useradd --system --home-dir $d --shell /usr/sbin/nologin nstance-agent
install -d -m 0755 $d; install -d -o nstance-agent -m 0700 $d/identity $d/keys; install -d -o nstance-agent -m 0750 $d/recv
umask 077
put() { cat > "$2.new"; chown "$1" "$2.new"; mv "$2.new" "$2"; }   # whoever reads it sees all of it or nothing
# On a later boot the agent has its certificate, and a CA bundle that may be newer than this one.
if ! { [ -e $d/identity/identity.crt ] && grep -qx 'NSTANCE_INSTANCE_ID={{ .Instance.ID }}' /etc/nstance/agent.env; }; then
  # The agent of an image runs by now if its machine was in use, speaks for that one, and would take what comes below.
  if [ -e /etc/nstance/agent.env ]; then systemctl stop nstance-agent || :; fi
  put nstance-agent $d/identity/ca.crt <<'PEM'
{{ .Cluster.CACert }}
PEM
  printf '%s' '{{ .Nonce }}' | put nstance-agent $d/identity/nonce.jwt
fi
install -d /etc/nstance; put root /etc/nstance/agent.env <<'ENV'
NSTANCE_INSTANCE_ID={{ .Instance.ID }}
NSTANCE_SERVER_REGISTRATION_ADDR={{ .Server.RegistrationAddr }}
NSTANCE_SERVER_AGENT_ADDR={{ .Server.AgentAddr }}
ENV
if ! command -v nstance-agent >/dev/null; then   # image without the package; not joined by &&, which `set -e` lets pass
  curl -fsSL --retry 5 -o /tmp/a '{{ .Vars.AgentURL }}'; echo '{{ .Vars.AgentSHA256 }}  /tmp/a' | sha256sum -c -; install -m 0755 /tmp/a /usr/local/bin/nstance-agent
  nstance-agent unit > /etc/systemd/system/nstance-agent.service; systemctl daemon-reload
fi
systemctl enable --now nstance-agent
