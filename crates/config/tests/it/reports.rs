//! Reports: every problem at once, each with path, place and remedy, in the two documented spellings.

use std::{net::IpAddr, sync::LazyLock};

use expect_test::{Expect, expect};
use nstance_config::{Checks, load};
use nstance_core::{
    ports::schema::{ArgsContext, KindFacts, ProviderSchema, SchemaFault, SchemaProblem},
    value::{Object, Value},
};

/// Provider `aws` with a handful of args, enough to see every kind of complaint.
struct Strict;

impl ProviderSchema for Strict {
    fn kind(&self) -> &'static str {
        "aws"
    }

    fn facts(&self) -> KindFacts {
        nstance_schemas::aws::Aws.facts()
    }

    fn check_options(&self, options: &Object) -> Vec<SchemaProblem> {
        nstance_schemas::aws::Aws.check_options(options)
    }

    fn check_args(&self, args: &Object, _: ArgsContext) -> Vec<SchemaProblem> {
        const KNOWN: [&str; 4] = ["ImageId", "SecurityGroupIds", "MetadataOptions", "SubnetId"];
        let unknown = |key| SchemaProblem::new(&[key], SchemaFault::UnknownKey { known: KNOWN.to_vec() });
        let mut problems: Vec<SchemaProblem> = args.keys().filter(|key| !KNOWN.contains(key)).map(unknown).collect();
        if args.get("SubnetId").is_some() {
            let what = SchemaFault::ManagedKey { instead: "use `subnet_pool`" };
            problems.push(SchemaProblem::new(&["SubnetId"], what));
        }
        if args.get("ImageId").is_none() {
            problems.push(SchemaProblem::new(&[], SchemaFault::Missing { key: "ImageId" }));
        }
        if let Some(Value::Array(groups)) = args.get("SecurityGroupIds")
            && let Some(at) = groups.iter().position(|it| it.as_str().is_none())
        {
            let what = SchemaFault::WrongType { expected: "a string" };
            problems.push(SchemaProblem::new(&["SecurityGroupIds", &at.to_string()], what));
        }
        problems
    }

    fn check_instance_type(&self, instance_type: &str) -> Option<String> {
        (!instance_type.contains('.')).then(|| format!("`{instance_type}` is no instance type"))
    }

    fn check_load_balancer(&self, load_balancer: &Object) -> Vec<SchemaProblem> {
        nstance_schemas::aws::Aws.check_load_balancer(load_balancer)
    }

    fn check_leader_network(&self, ip: Option<IpAddr>, interface_id: Option<&str>) -> Vec<SchemaProblem> {
        nstance_schemas::aws::Aws.check_leader_network(ip, interface_id)
    }
}

fn checks() -> Checks<'static> {
    static SCHEMAS: LazyLock<Vec<&'static dyn ProviderSchema>> = LazyLock::new(|| {
        let strict: &'static dyn ProviderSchema = &Strict;
        let others = nstance_schemas::ALL.iter().copied().filter(|it| it.kind() != strict.kind());
        std::iter::once(strict).chain(others).collect()
    });
    Checks::offline(&SCHEMAS)
}

/// A valid config with holes.
fn aws(server: &str, rest: &str) -> String {
    format!(
        r#"{{
  "server": {{ "cluster_id": "c", "shard": "s", "provider": {{ "kind": "aws", "region": "r", "zone": "z" }},
    "subnet_pools": {{ "control-plane": ["a"], "ingress": ["b"], "workers": ["c"] }},
    "secrets": {{ "encryption_key": {{ "provider": "env" }} }}{server} }},
  {rest}
}}"#
    )
}

fn check(config: &str, expected: Expect) {
    let loaded = load("config/s.jsonc", config.as_bytes(), &checks());
    assert_eq!(loaded.config.is_some(), loaded.report.is_ok());
    expected.assert_eq(&loaded.report.text());
}

#[test]
fn the_documented_report_comes_out() {
    let config = include_str!("../../../../examples/config-aws.jsonc")
        .replace("\"registration_timeout\"", "\"registrationTimeout\"")
        .replace(", \"vars\": { \"NodeLabels\": \"role=control-plane\" }", "")
        .replace("\"subnet_pool\": \"ingress\", \"load", "\"subnet_pool\": \"ingres\", \"load");
    let loaded = load("config/us-west-2a.jsonc", config.as_bytes(), &Checks::offline(nstance_schemas::ALL));
    expect![[r#"
        config/us-west-2a.jsonc: 3 errors, 0 warnings; nothing was applied
        error[unknown-key] server.garbage_collection.registrationTimeout (17:47)
          unknown key `registrationTimeout`
          help: did you mean `registration_timeout`?
        error[missing-var] templates.knc.files["node.env"].template.NODE_LABELS (47:67)
          group default/control-plane renders .Vars.NodeLabels, which no layer defines
          help: add it to vars of defaults, templates.knc or groups.control-plane, or write {{ .Vars.NodeLabels | default "" }}
        error[bad-reference] groups.default.ingress.subnet_pool (60:76)
          subnet pool `ingres` does not exist
          help: did you mean `ingress`? pools: control-plane, ingress, workers
    "#]]
    .assert_eq(&loaded.report.text());
    expect![[r#"{"object":"config/us-west-2a.jsonc","etag":null,"ok":false,"problems":[{"severity":"error","code":"unknown-key","path":"server.garbage_collection.registrationTimeout","line":17,"column":47,"message":"unknown key `registrationTimeout`","help":"did you mean `registration_timeout`?"},{"severity":"error","code":"missing-var","path":"templates.knc.files[\"node.env\"].template.NODE_LABELS","line":47,"column":67,"message":"group default/control-plane renders .Vars.NodeLabels, which no layer defines","help":"add it to vars of defaults, templates.knc or groups.control-plane, or write {{ .Vars.NodeLabels | default \"\" }}"},{"severity":"error","code":"bad-reference","path":"groups.default.ingress.subnet_pool","line":60,"column":76,"message":"subnet pool `ingres` does not exist","help":"did you mean `ingress`? pools: control-plane, ingress, workers"}]}"#]].assert_eq(&loaded.report.json());
}

#[test]
fn ten_mistakes_are_ten_problems_with_place_and_help() {
    let config = r#"{
  "shard": "s",
  "server": { "cluster_id": "c", "shard": "s", "provider": { "kind": "aws", "region": "r", "zone": "z" },
    "subnet_pools": { "control-plane": ["a"], "ingress": ["b"], "workers": ["c"] },
    "secrets": { "provider": "gcp-secret-manager" },
    "default_drain_timeout": 300,
    "leader_election": { "ttl": "6s", "renew_interval": "5s" },
    "create_burst": "3" },
  "certificates": { "web": { "kind": "server", "cn": "{{ .Instance.IP5 }}" } },
  "templates": { "knc": { "kind": "knc", "arch": "x86_64", "subnet_pool": "control-plane" } },
  "groups": {
    "web": { "template": "knx", "size": 20000 },
    "web": { "template": "knc" }
  }
}"#;
    let loaded = load("config/s.jsonc", config.as_bytes(), &checks());
    assert_eq!(loaded.report.n_errors(), 10);
    for problem in &loaded.report.problems {
        assert!(!problem.path.is_empty() && 0 < problem.line && 0 < problem.column, "{problem}");
        assert!(problem.help.is_some(), "{problem}");
    }
    expect![[r#"
        config/s.jsonc: 10 errors, 0 warnings; nothing was applied
        error[unknown-key] shard (2:3)
          unknown key `shard`
          help: it belongs into the `server` block: server.shard
        error[bad-value] server.secrets.provider (5:30)
          this value is not known here
          help: here it is called `google-secret-manager`
        error[bad-value] server.default_drain_timeout (6:30)
          a duration needs a unit
          help: write it as "300s", or with ms, m, h, d or w
        error[conflict] server.leader_election.ttl (7:33)
          2 · renew_interval 5s + margin 1s must be less than ttl 6s
          help: a lease must survive one failed renewal
        error[wrong-type] server.create_burst (8:21)
          expected an integer, found a string
          help: write it without quotes
        error[unknown-field] certificates.web.cn (9:54)
          .Instance.IP5: no such field
          help: did you mean IP4?
        error[bad-value] templates.knc.arch (10:50)
          `x86_64` is not known here
          help: here it is called `amd64`
        error[bad-reference] groups.web.template (12:26)
          template `knx` does not exist
          help: did you mean `knc`? templates: knc
        error[bad-value] groups.web.size (12:41)
          20000 is out of range
          help: use 0 to 10000
        error[duplicate-key] groups.web (13:5)
          key `web` occurs twice in this object
          help: the first is at 12:5; keep one of them
    "#]]
    .assert_eq(&loaded.report.text());
}

#[test]
fn values_below_secrets_are_never_shown() {
    let config = r#"{
  "server": { "cluster_id": "c", "shard": "s", "provider": { "kind": "aws", "region": "r", "zone": "z" },
    "subnet_pools": { "a": ["b"] },
    "secrets": { "provider": "hunter2-store", "prefix": 5, "cache_ttl": "hunter2", "hunter": "hunter2",
      "encryption_key": { "provider": "hunter2", "source": "hunter2", "options": { "project": "hunter2" } },
      "old_encryption_keys": [{ "provider": "file", "source": "hunter2" }, "hunter2"] } }
}"#;
    let loaded = load("config/s.jsonc", config.as_bytes(), &checks());
    assert!(!loaded.report.text().contains("hunter2") && !loaded.report.json().contains("hunter2"));
    expect![[r#"
        config/s.jsonc: 8 errors, 0 warnings; nothing was applied
        error[bad-value] server.secrets.provider (4:30)
          this value is not known here
          help: use one of: object-storage, aws-secrets-manager, aws-parameter-store, google-secret-manager, memory
        error[wrong-type] server.secrets.prefix (4:57)
          expected a string, found a number
          help: write it in double quotes
        error[bad-value] server.secrets.cache_ttl (4:73)
          this value is no duration
          help: write numbers with units, such as "90s", "1h30m" or "21d"
        error[unknown-key] server.secrets.hunter (4:84)
          unknown key `hunter`
          help: known keys: provider, prefix, encryption_key, old_encryption_keys, cache_ttl
        error[bad-value] server.secrets.encryption_key.provider (5:39)
          this value is not known here
          help: use one of: env, file, aws-secrets-manager, aws-parameter-store, google-secret-manager
        error[unknown-key] server.secrets.encryption_key.options.project (5:84)
          unknown key `project`
          help: known keys: project_id
        error[bad-value] server.secrets.old_encryption_keys[0].source (6:63)
          the path of a key file must be absolute
          help: begin it with `/`
        error[wrong-type] server.secrets.old_encryption_keys[1] (6:76)
          expected an object, found a string
    "#]]
    .assert_eq(&loaded.report.text());
}

#[test]
fn a_number_below_secrets_is_not_shown_either() {
    let config = aws("", "\"groups\": {}").replace("\"secrets\": {", "\"secrets\": { \"cache_ttl\": 4711,");
    let text = load("s", config.as_bytes(), &checks()).report.text();
    assert!(text.contains("server.secrets.cache_ttl") && !text.contains("4711"), "{text}");
}

#[test]
fn foreign_spellings_get_a_pointed_hint() {
    let config = r#"{
  "cluster": "c", "shard": "s",
  "server": { "clusterID": "c", "shard": "s", "provider": { "kind": "mock", "region": "r", "zone": "z" },
    "leader_timeout": "5s", "frequent_interval": "1s",
    "subnetPools": { "a": ["b"] },
    "secrets": { "provider": "gcp-secret-manager" } }
}"#;
    check(
        config,
        expect![[r#"
        config/s.jsonc: 8 errors, 0 warnings; nothing was applied
        error[unknown-key] cluster (2:3)
          unknown key `cluster`
          help: it belongs into the `server` block: server.cluster_id
        error[unknown-key] shard (2:19)
          unknown key `shard`
          help: it belongs into the `server` block: server.shard
        error[unknown-key] server.clusterID (3:15)
          unknown key `clusterID`
          help: did you mean `cluster_id`?
        error[bad-value] server.provider.kind (3:69)
          `mock` is not known here
          help: here it is called `fake`
        error[unknown-key] server.leader_timeout (4:5)
          unknown key `leader_timeout`
          help: write it as `leader_election.ttl`
        error[unknown-key] server.frequent_interval (4:29)
          unknown key `frequent_interval`
          help: write it as `leader_election.renew_interval`
        error[unknown-key] server.subnetPools (5:5)
          unknown key `subnetPools`
          help: did you mean `subnet_pools`?
        error[bad-value] server.secrets.provider (6:30)
          this value is not known here
          help: here it is called `google-secret-manager`
    "#]],
    );
}

#[test]
fn a_provider_that_does_not_exist_and_a_foreign_shard_are_told() {
    let config = aws("", "\"groups\": {}").replace("\"aws\"", "\"azure\"");
    let shard = "other".parse().unwrap();
    let loaded = load("s", config.as_bytes(), &Checks { shard: Some(&shard), ..checks() });
    expect![[r#"
        s: 2 errors, 0 warnings; nothing was applied
        error[conflict] server.shard (2:43)
          this is the config of shard `s`, but shard `other` is served here
          help: upload the config of the right shard, or change --shard
        error[bad-value] server.provider.kind (2:70)
          `azure` is not known here
          help: use one of: aws, gcp, proxmox, process, tmux, fake
    "#]]
    .assert_eq(&loaded.report.text());
}

#[test]
fn server_settings_are_checked_against_each_other() {
    let config = aws(
        r#",
    "bind": { "health_addr": ":8991", "agent_addr": "host" },
    "advertise": { "health_addr": "1.2.3.4:0", "extra_sans": ["ok.example", "not ok", "::1"] },
    "leader_network": { "ip": "0.0.0.0" },
    "garbage_collection": { "interval": "5m" },
    "expiry": { "eligible_age": "30d", "forced_age": "21d" },
    "error_exit_jitter": { "min_delay": "10s" },
    "health_check_interval": "10ms",
    "safety": { "mass_disconnect_percent": 0, "runaway_base": 1.0 },
    "dynamic_subnet_pools": ["worker"]"#,
        "\"groups\": {}",
    );
    check(
        &config,
        expect![[r#"
        config/s.jsonc: 13 errors, 0 warnings; nothing was applied
        error[conflict] server.bind.health_addr (5:30)
          `election_addr` and `health_addr` are the same port 8991
          help: the five listeners need five ports
        error[bad-value] server.bind.agent_addr (5:53)
          `host` is no address
          help: write host:port, [v6]:port or :port, port 1 to 65535
        error[bad-value] server.advertise.health_addr (6:35)
          port 0 is for the providers process, tmux and fake
          help: use 1 to 65535
        error[bad-value] server.advertise.extra_sans[1] (6:77)
          `not ok` is neither a DNS name nor an IP address
        error[missing] server.leader_network.interface_id (7:23)
          `interface_id` is missing
          help: add "interface_id" to `server.leader_network`
        error[bad-value] server.leader_network.ip (7:31)
          `0.0.0.0` is no IP address
          help: write the address that moves with leadership
        error[conflict] server.garbage_collection.interval (8:41)
          interval 5m must be less than registration_timeout 5m
          help: shorten the interval
        error[conflict] server.expiry.eligible_age (9:33)
          eligible_age 30d must be less than forced_age 21d
          help: eligible instances need time before they are forced out
        error[conflict] server.error_exit_jitter.min_delay (10:41)
          min_delay 10s is more than max_delay 5s
          help: swap them
        error[bad-value] server.health_check_interval (11:30)
          `health_check_interval` is too short
          help: use 1s or more
        error[bad-value] server.safety.mass_disconnect_percent (12:44)
          0 is out of range
          help: use 1 to 100
        error[wrong-type] server.safety.runaway_base (12:63)
          expected an integer, found a decimal number
          help: write it without a decimal point
        error[bad-reference] server.dynamic_subnet_pools[0] (13:30)
          subnet pool `worker` does not exist
          help: did you mean `workers`? pools: control-plane, ingress, workers
    "#]],
    );
}

#[test]
fn templates_and_files_are_checked() {
    let config = aws(
        "",
        r#""certificates": { "web": { "kind": "server", "cn": "x", "ttl": "1m" }, "agent": { "ttl": 0 }, "ca": { "dns": ["x"], "ttl": "1d" } },
  "defaults": { "vars": { "a-b": "x", "Port": 80 }, "userdata": { "source": "url", "content": "http://example.net/x" } },
  "templates": {
    "-bad": { "kind": "opr", "arch": "amd64" },
    "knc": { "kind": "knc", "arch": "amd64", "userdata": { "content": "x", "templateString": "y" },
      "files": {
        "errors": { "kind": "string", "template": "" },
        "../x": { "kind": "text", "template": "" },
        "c.crt": { "kind": "certificate", "template": "agent" },
        "d.crt": { "kind": "certificate", "template": "wob", "key": { "from": "server", "name": "../k" } },
        "s": { "kind": "secret", "source": "ca.key" },
        "o": { "kind": "storage", "source": "shard/s/groups.jsonc" },
        "e.env": { "kind": "env", "template": { "A-B": "x" } },
        "j.json": { "kind": "json", "template": "x" },
        "n": { "kind": "string" }
      } }
  }"#,
    );
    check(
        &config,
        expect![[r#"
        config/s.jsonc: 22 errors, 0 warnings; nothing was applied
        error[bad-value] certificates.web.ttl (5:66)
          this ttl is too short
          help: use 10m or more
        error[bad-value] certificates.agent.ttl (5:92)
          0 is out of range
          help: use 1 to 87600
        error[unknown-key] certificates.ca.dns (5:105)
          unknown key `dns`
          help: known keys: kind, cn, organization, country, province, locality, street, postal_code, ttl
        error[bad-value] certificates.ca.ttl (5:126)
          this ttl is too short
          help: use 30d or more
        error[bad-value] defaults.vars.a-b (6:27)
          `a-b` is no valid name here
          help: use letters, digits and _, beginning with a letter or _
        error[wrong-type] defaults.vars.Port (6:47)
          expected a string, found a number
          help: write it in double quotes
        error[bad-value] defaults.userdata.content (6:95)
          userdata over http could be changed on its way
          help: use https, or add `sha256`
        error[bad-value] templates.-bad (8:5)
          `-bad` is no valid template name
          help: use 1 to 32 of A-Z a-z 0-9 _ -, beginning with a letter or digit
        error[bad-value] templates.-bad.kind (8:23)
          instance kind `opr` is not valid
          help: use three lower-case letters, not `opr`
        error[conflict] templates.knc.userdata (9:58)
          userdata is given in more than one form
          help: write `content` (with `source` and `encoding`), or `templateString`, or `templateUrl`
        error[bad-value] templates.knc.files.errors (11:9)
          the file name `errors` is reserved
          help: the agent keeps its messages there
        error[bad-value] templates.knc.files["../x"] (12:9)
          `../x` is no valid file name
          help: use 1 to 128 of A-Z a-z 0-9 . _ -, beginning with a letter, digit or _, without `..`
        error[bad-value] templates.knc.files["../x"].kind (12:27)
          `text` is not known here
          help: here it is called `string`
        error[bad-reference] templates.knc.files["c.crt"].template (13:55)
          certificate `agent` is reserved for nstance itself
          help: define a certificate of another name
        error[bad-reference] templates.knc.files["d.crt"].template (14:55)
          certificate `wob` does not exist
          help: did you mean `web`? certificates: web
        error[bad-value] templates.knc.files["d.crt"].key.from (14:79)
          `server` is not known here
          help: use one of: agent
        error[bad-value] templates.knc.files["d.crt"].key.name (14:97)
          `../k` is no valid key name
          help: use 1 to 128 of A-Z a-z 0-9 . _ -, beginning with a letter, digit or _, without `..`
        error[bad-value] templates.knc.files.s.source (15:44)
          secret `ca.key` never leaves the server
        error[bad-value] templates.knc.files.o.source (16:45)
          objects below `shard/` are nstance's own
          help: put files for instances elsewhere, e.g. below files/
        error[bad-value] templates.knc.files["e.env"].template.A-B (17:49)
          `A-B` is no valid name here
          help: use letters, digits and _, beginning with a letter or _
        error[wrong-type] templates.knc.files["j.json"].template (18:49)
          expected an object or a list
        error[missing] templates.knc.files.n.template (19:14)
          `template` is missing
          help: add "template" to `templates.knc.files.n`
    "#]],
    );
}

#[test]
fn groups_are_merged_and_rendered() {
    let config = aws(
        "",
        r#""images": { "debian": { "provider": "aws", "filters": [{ "name": "n", "values": ["v"] }] } },
  "certificates": { "web": { "kind": "server", "cn": "{{ .Vars.Cn }}", "dns": ["{{ .Vars.Name }}"] } },
  "defaults": { "userdata": { "templateString": "set -e\n{{ .Instance.IP4 }}\n{{ if .Vars.X }}" },
    "args": { "ImageId": "{{ .Image.debain }}", "SecurityGroupIds": ["a", 5] } },
  "templates": {
    "knc": { "kind": "knc", "arch": "amd64", "args": { "SubnetId": "x", "Imageid": "x" },
      "files": { "a.crt": { "kind": "certificate", "template": "web" },
        "b.env": { "kind": "env", "template": { "A": "{{ .Vars.Labels }}", "B": "{{ .Cluster.FQDN }}", "C": "{{ .Vars.Lines }}" } } } },
    "dyn": { "kind": "dyn", "arch": "amd64", "instance_type": "t.x", "subnet_pool": "workers",
      "files": { "x": { "kind": "string", "template": "{{ .Vars.Later }}{{ if .Vars.Ok }}{{ .Vars.Ok }}{{ end }}" } } } },
  "groups": {
    "one": { "template": "knc" },
    "two": { "template": "knc", "subnet_pool": "workers", "instance_type": "large", "vars": { "Cn": "x", "Name": "not ok", "Label": "l", "Lines": "a\nb" } },
    "default": { "one": { "template": "knc" } },
    "nobody": { "three": { "template": "knc" } }
  }"#,
    );
    check(
        &config,
        expect![[r#"
        config/s.jsonc: 11 errors, 1 warning; nothing was applied
        error[template-syntax] defaults.userdata.templateString (7:49)
          line 3 of the template: `if` is never closed
          help: close it with {{ end }}
        error[bad-reference] defaults.args.ImageId (8:26)
          image `debain` does not exist
          help: did you mean `debian`? images: debian
        error[provider-args] defaults.args.SecurityGroupIds[1] (8:75)
          expected a string
        error[provider-args] templates.knc.args.SubnetId (10:56)
          arg `SubnetId` is set by nstance itself
          help: use `subnet_pool`
        error[provider-args] templates.knc.args.Imageid (10:73)
          provider aws has no arg `Imageid`
          help: did you mean `ImageId`? known: ImageId, SecurityGroupIds, MetadataOptions, SubnetId
        error[missing-var] templates.knc.files["b.env"].template.A (12:54)
          group default/two renders .Vars.Labels, which no layer defines
          help: did you mean Label? add it to vars of defaults, templates.knc or groups.two, or write {{ .Vars.Labels | default "" }}
        error[missing-var] templates.knc.files["b.env"].template.B (12:81)
          group default/two renders .Cluster.FQDN, but no layer defines the var ClusterFQDN
          help: add ClusterFQDN to vars of defaults, templates.knc or groups.two, or write {{ .Cluster.FQDN | default "" }}
        warning[undefined-var] templates.dyn.files.x.template (14:55)
          template dyn renders .Vars.Later, which neither it nor defaults define
          help: every group made over the API has to set it, or write {{ .Vars.Later | default "" }}
        error[missing] groups.one.subnet_pool (16:12)
          neither the group nor its template names a subnet pool
          help: pools: control-plane, ingress, workers
        error[bad-value] groups.two.instance_type (17:76)
          `large` is no instance type
        error[conflict] groups.default.one (18:18)
          group default/one is defined twice
          help: the other one is groups.one
        error[bad-reference] groups.nobody (19:5)
          tenant `nobody` does not exist
          help: tenants: default; or list it in `tenants`
    "#]],
    );
}

#[test]
fn results_that_do_not_fit_their_place_are_refused() {
    let config = aws(
        "",
        r#""certificates": { "web": { "kind": "server", "cn": "x", "dns": ["{{ .Vars.Name }}"] } },
  "defaults": { "userdata": { "content": "x" }, "args": { "ImageId": "x" } },
  "templates": {
    "knc": { "kind": "knc", "arch": "amd64", "instance_type": "t.x", "subnet_pool": "workers",
      "files": { "a.crt": { "kind": "certificate", "template": "web" },
        "b.env": { "kind": "env", "template": { "C": "{{ .Vars.Lines }}" } } } } },
  "groups": { "two": { "template": "knc", "vars": { "Name": "not ok", "Lines": "a\nb" } } }"#,
    );
    check(
        &config,
        expect![[r#"
        config/s.jsonc: 2 errors, 0 warnings; nothing was applied
        error[bad-value] certificates.web.dns[0] (5:67)
          for group default/two: certificate web, dns[0]: "not ok" is not a DNS name
        error[bad-value] templates.knc.files["b.env"].template.C (10:54)
          for group default/two: C renders to a value with a line break or NUL, which an env file cannot hold
    "#]],
    );
}

#[test]
fn warnings_do_not_stand_in_the_way() {
    let config = aws(
        r#", "garbage_collection": { "interval": 0, "registration_timeout": "0" }"#,
        r#""templates": { "a": { "kind": "aaa", "arch": "amd64", "args": { "ImageId": "i" } },
    "b": { "kind": "bbb", "arch": "arm64", "args": { "ImageId": "i" }, "userdata": { "templateUrl": "https://example.net/u" } } }"#,
    );
    check(
        &config,
        expect![[r#"
        config/s.jsonc: 0 errors, 3 warnings
        warning[gc-off] server.garbage_collection.interval (4:97)
          garbage collection is off: instances that never register are not removed
          help: set both interval and registration_timeout
        warning[no-userdata] templates.a (5:18)
          template a has no userdata, so no agent would start on its instances
          help: add `userdata` to the template or to `defaults`
        warning[unpinned-url] templates.b.userdata.templateUrl (6:101)
          this URL is fetched without a checksum
          help: add `sha256`, so that a changed file is noticed before it runs on instances
    "#]],
    );
}
