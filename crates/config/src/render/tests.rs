use proptest::prelude::*;

use super::*;

fn data() -> RenderData {
    let vars = [("Name", "web"), ("Empty", ""), ("NodeLabels", "a=1,b=2"), ("Path", "a/b"), ("Quoted", "say \"hi\"")];
    RenderData {
        cluster_id: "c1".to_owned(),
        ca_cert: "PEM".to_owned(),
        shard: "s1".to_owned(),
        registration_addr: "10.0.0.1:8992".to_owned(),
        provider_kind: "aws".to_owned(),
        zone: "z".to_owned(),
        vars: vars.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect(),
        images: BTreeMap::from([("debian".to_owned(), "ami-1".to_owned()), ("a-b".to_owned(), "ami-2".to_owned())]),
        nonce: "jwt".to_owned(),
        instance: InstanceData {
            id: "knc1".to_owned(),
            arch: "arm64".to_owned(),
            ip4: "192.0.2.1".to_owned(),
            subnet_pool: "workers".to_owned(),
            ..InstanceData::default()
        },
        ..RenderData::default()
    }
}

fn render(source: &str) -> Result<String, String> {
    render_text(source, Context::File, &data()).map_err(|error| error.message)
}

#[track_caller]
fn gives(source: &str, expected: &str) {
    assert_eq!(render(source).as_deref(), Ok(expected), "{source}");
}

#[track_caller]
fn fails(source: &str, expected: &str) {
    match render(source) {
        Ok(text) => panic!("{source} renders {text:?}"),
        Err(message) => assert!(message.contains(expected), "{source}: {message}"),
    }
}

#[test]
fn the_language_of_go_is_understood() {
    gives("{{ .Instance.ID }} in {{ .Instance.Subnet.Pool }}/{{ .ClusterID }}", "knc1 in workers/c1");
    gives("{{ if eq .Provider.Kind \"gcp\" \"aws\" }}y{{ else if true }}n{{ else }}z{{ end }}", "y");
    gives("{{ with .Instance }}{{ .ID }}{{ $.Cluster.ID }}{{ else }}none{{ end }}", "knc1c1");
    gives("{{ range $i, $it := split \",\" .Vars.NodeLabels }}{{ $i }}:{{ $it }};{{ end }}", "0:a=1;1:b=2;");
    gives("{{ range $k, $v := .Image }}{{ $k }}={{ $v }} {{ end }}", "a-b=ami-2 debian=ami-1 ");
    gives("{{ range 3 }}{{ if eq . 1 }}{{ continue }}{{ end }}{{ . }}{{ end }}", "02");
    gives("{{ range 9 }}{{ if eq . 2 }}{{ break }}{{ end }}{{ . }}{{ else }}x{{ end }}", "01");
    gives("{{ range split \",\" \"\" }}[{{ . }}]{{ end }}{{ range 0 }}{{ else }}none{{ end }}", "[]none");
    gives("{{ $x := 1 }}{{ if true }}{{ $x = 2 }}{{ $y := 3 }}{{ end }}{{ $x }}", "2");
    gives("{{ define \"t\" }}<{{ .ID }}{{ $.Arch }}>{{ end }}{{ template \"t\" .Instance }}", "<knc1arm64>");
    gives("{{ block \"b\" .Vars.Name }}[{{ . }}]{{ end }}", "[web]");
    gives("a {{- /* gone */}} b{{/* gone\n*/ -}}  c", "a bc");
    gives("x  {{- .Vars.Name -}}  y", "xweby");
    gives("{{ printf \"%s-%03d-%q-%v\" .Vars.Name 7 \"a\" true }}", "web-007-\"a\"-true");
    gives("{{ print 1 2 \"x\" 3.5 }} {{ println 1 \"a\" }}", "1 2x3.5 1 a\n");
    gives("{{ 0x10 }} {{ 1_000 }} {{ 'a' }} {{ 1e3 }} {{ `raw\\n` }} {{ \"tab\\t\" }}", "16 1000 97 1000 raw\\n tab\t");
    gives(
        "{{ len .Vars.Name }} {{ index .Image \"a-b\" }} {{ slice .Vars.Name 1 2 }} {{ index (split \"/\" .Vars.Path) 1 }}",
        "3 ami-2 e b",
    );
    gives(
        "{{ and 1 \"\" 2 }}|{{ or 0 \"\" \"x\" }}|{{ not true }}|{{ lt 1 2 }}{{ ge \"b\" \"a\" }}{{ ne 1 1 }}",
        "|x|false|truetruefalse",
    );
    gives("{{ html \"<a>\" }} {{ js \"it's\" }} {{ urlquery \"a b&c\" }}", "&lt;a&gt; it\\'s a+b%26c");
    gives("{{ (index .Vars \"Name\") | upper | printf \"%s!\" }}", "WEB!");
    gives("no actions at all }} here", "no actions at all }} here");
    gives("{{ .Instance.OnDemand }}", "false");
    gives("{{ with $x := .Vars.Name }}{{ $x }}{{ end }}", "web");
}

#[test]
fn our_functions_do_what_their_names_say() {
    gives("{{ .Vars.Name | default \"x\" }}{{ .Vars.Empty | default \"y\" }}{{ .Vars.None | default \"z\" }}", "webyz");
    gives("{{ .Vars.Quoted | quote }} {{ quote 5 }}", "\"say \\\"hi\\\"\" \"5\"");
    gives("{{ lower \"AbC\" }}{{ upper \"abc\" }}[{{ trim \" x\\n\" }}]", "abcABC[x]");
    gives("{{ .Vars.Path | replace \"/\" \"-\" }}", "a-b");
    gives("{{ .Vars.NodeLabels | split \",\" | join \" \" }}", "a=1 b=2");
    gives("{{ indent 2 \"a\\nb\" }}|{{ \"a\\nb\" | nindent 1 }}", "  a\n  b|\n a\n b");
    gives("{{ b64enc \"hello\" }} {{ b64dec \"aGVsbG8=\" }}", "aGVsbG8= hello");
    gives(
        "{{ toJson .Vars.Quoted }}{{ toJson (split \",\" .Vars.NodeLabels) }}{{ toJson .Image }}",
        "\"say \\\"hi\\\"\"[\"a=1\",\"b=2\"]{\"a-b\":\"ami-2\",\"debian\":\"ami-1\"}",
    );
    gives("{{ hasKey .Vars \"Name\" }}{{ hasKey .Vars \"Nope\" }}", "truefalse");
    gives("{{ sha256sum \"\" }}", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    gives("{{ required \"name it\" .Vars.Name }}", "web");
    fails("{{ required \"name it\" .Vars.Nope }}", "name it");
    fails("{{ b64dec \"?\" }}", "b64dec: this is not base64");
    fails("{{ lower 5 }}", "lower: expected a string, found an int");
    fails("{{ replace \"a\" \"b\" }}", "replace takes 3 arguments, not 2");
}

#[test]
fn a_missing_key_is_an_error_with_its_path_and_the_nearest_key() {
    fails("{{ .Vars.NodeLabel }}", ".Vars.NodeLabel: no such key, did you mean NodeLabels?");
    fails("{{ index .Vars \"NodeLabel\" }}", ".Vars.NodeLabel: no such key, did you mean NodeLabels?");
    fails("{{ with .Vars }}{{ .NodeLabel }}{{ end }}", ".Vars.NodeLabel: no such key");
    fails("{{ .Image.debain }}", ".Image.debain: no such key, did you mean debian?");
    fails("{{ .Cluster.FQDN }}", ".Cluster.FQDN: no such key");
    fails("\n\n{{ upper .Vars.Nope }}", "line 3: .Vars.Nope: no such key");
    for source in [
        "{{ printf \"%s\" .Vars.Nope }}",
        "{{ eq .Vars.Nope \"\" }}",
        "{{ .Vars.Nope | quote }}",
        "{{ range .Vars.Nope }}{{ end }}",
        "{{ $x := .Vars.Nope }}",
        "{{ len .Vars.Nope }}",
        "{{ toJson .Vars.Nope }}",
        "{{ or .Vars.Nope .Vars.Nada }}",
        "{{ default .Vars.Nope .Vars.Nope }}",
        "{{ define \"t\" }}{{ . }}{{ end }}{{ template \"t\" .Vars.Nope }}",
        "{{ index .Vars .Vars.Nope }}",
        "{{ if eq .Vars.Nope \"a\" }}{{ end }}",
    ] {
        fails(source, "no such key");
    }
}

#[test]
fn a_missing_value_may_flow_where_it_is_asked_for() {
    gives(
        "{{ .Vars.Nope | default \"d\" }}{{ default \"e\" .Vars.Nope }}{{ index .Vars \"Nope\" | default \"f\" }}",
        "def",
    );
    gives("{{ if .Vars.Nope }}y{{ else }}n{{ end }}{{ with .Vars.Nope }}y{{ else }}n{{ end }}", "nn");
    gives("{{ if and .Vars.Name .Vars.Nope }}y{{ else }}n{{ end }}{{ if or .Vars.Nope .Vars.Name }}y{{ end }}", "ny");
    gives("{{ if not .Vars.Nope }}y{{ end }}{{ not (index .Vars \"Nope\") }}", "ytrue");
    gives("{{ or .Vars.Nope \"x\" }}{{ (or .Vars.Nope .Vars.Nada) | default \"z\" }}", "xz");
    gives("{{ if hasKey .Vars \"Nope\" }}{{ .Vars.Nope }}{{ end }}", "");
    gives("{{ .Cluster.FQDN | default \"none\" }}", "none");
    gives("{{ with $x := .Vars.Nope }}{{ $x }}{{ else }}n{{ end }}{{ if $x := .Vars.Name }}{{ $x }}{{ end }}", "nweb");
    fails("{{ if $x := .Vars.Nope }}{{ else }}{{ $x }}{{ end }}", ".Vars.Nope: no such key");
    gives("{{ if (.Vars.Nope) }}{{ end }}{{ .Vars.Nope.Deeper | default \"d\" }}", "d");
}

#[test]
fn a_field_that_does_not_exist_is_an_error_even_behind_default() {
    fails("{{ .Instance.Ip4 | default \"x\" }}", ".Instance.Ip4: no such field");
    fails("{{ .Nope }}", ".Nope: no such field");
    fails("{{ .Vars.Name.Inner }}", "there is no field Inner in a string");
    let error = render_text("{{ .Instance.Hostnam }}", Context::File, &data()).unwrap_err();
    assert_eq!((error.kind, error.help.as_deref()), (RenderErrorKind::UnknownField, Some("did you mean Hostname?")));
}

#[test]
fn a_field_known_elsewhere_says_where_and_why() {
    for (source, context, help) in [
        ("{{ .Nonce }}", Context::Args, "userdata only"),
        ("{{ .Nonce | default \"\" }}", Context::File, "userdata only"),
        ("{{ .Instance.IP4 }}", Context::Userdata, "only once the instance runs"),
        ("{{ .Instance.Hostname }}", Context::Args, "files and certificates"),
        ("{{ .ClusterID }}", Context::Userdata, "write .Cluster.ID"),
        ("{{ .Instance.ID }}", Context::Ca, "before there is any instance"),
    ] {
        let error = render_text(source, context, &data()).unwrap_err();
        assert_eq!(error.kind, RenderErrorKind::UnknownField);
        assert!(error.help.as_deref().is_some_and(|it| it.contains(help)), "{error:?}");
    }
    assert_eq!(render_text("{{ .Nonce }}", Context::Userdata, &data()).as_deref(), Ok("jwt"));
    assert_eq!(render_text("{{ .Cluster.ID }}{{ .Vars.Name }}", Context::Ca, &data()).as_deref(), Ok("c1web"));
}

#[test]
fn what_go_refuses_is_refused() {
    for (source, message) in [
        ("{{ if .Vars.Name }}cut off", "`if` is never closed"),
        ("{{ end }}", "`end` without a block"),
        ("{{ nope .Vars.Name }}", "function `nope` does not exist"),
        ("{{ call .Vars.Name }}", "`call` is not available"),
        ("{{ $x }}", "variable $x is not defined"),
        ("{{ $x = 1 }}", "variable $x is not defined"),
        ("{{ if true }}{{ $x := 1 }}{{ end }}{{ $x }}", "variable $x is not defined"),
        ("{{ template \"nope\" . }}", "template \"nope\" is not defined"),
        ("{{ .Vars.Name .Vars.Path }}", "a value is followed by another"),
        ("{{ 1 | .Vars.Name }}", "piped into something that is no function"),
        ("{{ nil }}", "nil is no command"),
        ("{{ }}", ""),
        ("{{ .Vars.Name", "never closed"),
        ("{{ eq 1 \"a\" }}", "incompatible types"),
        ("{{ index (split \",\" \"a\") 5 }}", "index"),
        ("{{ define \"a\" }}1{{ end }}{{ define \"a\" }}2{{ end }}", "defined twice"),
        ("{{ define \"t\" }}{{ . }}{{ end }}{{ template \"t\" }}", "no value to print"),
        ("{{ range $i, $v := 3 }}{{ end }}", "one variable only"),
        ("{{ range .Vars.Name }}{{ end }}", "range cannot go over a string"),
    ] {
        fails(source, message);
    }
}

#[test]
fn runaway_templates_are_stopped() {
    let kind = |source: &str| render_text(source, Context::File, &data()).unwrap_err().kind;
    for source in [
        "{{ range 1000000000 }}{{ end }}",
        "{{ range 2000 }}{{ range 2000 }}{{ end }}{{ end }}",
        "{{ define \"t\" }}{{ template \"t\" . }}{{ end }}{{ template \"t\" . }}",
        "{{ $x := \"aaaaaaaa\" }}{{ range 60 }}{{ $x = print $x $x }}{{ end }}",
        "{{ $x := printf \"%60000s\" \"a\" }}{{ range 40 }}{{ $x }}{{ end }}",
        "{{ $x := printf \"%60000s\" \"a\" }}{{ replace \" \" $x $x }}",
        "{{ $x := printf \"%60000s\" \"a\" }}{{ join $x (split \" \" $x) }}",
        "{{ indent 1000000000000 \"x\" }}",
        &format!("{{{{ printf \"{}\" 1 }}}}", "%60000d".repeat(400)),
    ] {
        assert_eq!(kind(source), RenderErrorKind::Limit, "{source:.80}");
    }
    let deep = format!("{}{}", "{{ if true }}".repeat(99), "{{ end }}".repeat(99));
    assert!(render(&deep).is_ok());
    let deeper = format!("{}{}", "{{ if true }}".repeat(150), "{{ end }}".repeat(150));
    assert!(render(&deeper).is_err());
}

#[test]
fn no_value_is_never_printed() {
    for source in
        ["{{ .Vars.X }}", "{{ index .Vars \"X\" }}", "{{ print .Vars.X }}", "{{ or .Vars.X }}", "{{ and .Vars.X }}"]
    {
        assert!(render(source).is_err(), "{source}");
    }
}

#[test]
fn env_files_are_sorted_and_quoted() {
    let data = data();
    let renderer = Renderer::new(Context::File, &data);
    let template = [
        ("Z", "{{ .Vars.Name }}"),
        ("A", "two words"),
        ("B", "q\"$`\\x"),
        ("C", ""),
        ("D", "it's"),
        ("E", "a#b"),
        ("F", "{{ .Vars.NodeLabels }}"),
    ];
    let template = template.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    assert_eq!(
        render_env(&renderer, &template, &Path::root()).unwrap(),
        "A=\"two words\"\nB=\"q\\\"\\$\\`\\\\x\"\nC=\nD=\"it's\"\nE=\"a#b\"\nF=a=1,b=2\nZ=web\n"
    );
    for bad in ["a\nb", "a\0b"] {
        let template = BTreeMap::from([("A".to_owned(), bad.to_owned())]);
        assert!(render_env(&renderer, &template, &Path::root()).is_err());
    }
}

#[test]
fn json_files_keep_order_and_other_values() {
    let (node, _) = crate::jsonc::parse(
        br#"{"z": "{{ .Vars.Quoted }}", "a": [1, 1.0, true, null, {}, []], "{{ key }}": {"n": -2.5e3}}"#,
    );
    let data = data();
    let renderer = Renderer::new(Context::File, &data);
    let value = renderer.value(&node.unwrap().to_value(), &Path::root()).unwrap();
    let mut out = String::new();
    write_pretty(&mut out, &value, 0);
    expect_test::expect![[r#"
        {
          "z": "say \"hi\"",
          "a": [
            1,
            1.0,
            true,
            null,
            {},
            []
          ],
          "{{ key }}": {
            "n": -2500.0
          }
        }"#]]
    .assert_eq(&out);
}

#[test]
fn fetched_userdata_is_held_against_its_checksum() {
    let config = r#"{
      "server": { "cluster_id": "c", "shard": "s", "provider": { "kind": "fake", "region": "r", "zone": "z" },
        "subnet_pools": { "one": ["a"] }, "secrets": { "provider": "memory" } },
      "templates": { "tst": { "kind": "tst", "arch": "amd64", "subnet_pool": "one", "userdata": { "templateUrl": "https://x/",
        "sha256": "2CF24DBA5FB0A30E26E83B2AC5B9E29E1B161E5C1FA7425E73043362938B9824" } } },
      "groups": { "web": { "template": "tst" } } }"#;
    let loaded = crate::load("userdata", config.as_bytes(), &crate::Checks::offline(nstance_schemas::ALL));
    let config = loaded.config.unwrap();
    let group = config.merge(&crate::merge::tests::group_ref("default", "web"), None).unwrap();
    assert_eq!(render_fetched_userdata(&group, &data(), b"hello"), Ok(Some("hello".to_owned())));
    assert!(render_fetched_userdata(&group, &data(), b"hallo").is_err());
    assert!(render_userdata(&group, &data()).unwrap_err().message.contains("has not been fetched"));
}

fn certificate(dns: &[&str], ip: &[&str]) -> CertificateSpec {
    let list = |it: &[&str]| it.iter().map(|it| (*it).to_owned()).collect();
    CertificateSpec {
        name: "kubelet".to_owned(),
        kind: CertificateKind::Server,
        cn: "system:node:{{ .Instance.ID }}".to_owned(),
        names: CertificateNames { dns: list(dns), ip: list(ip), ..CertificateNames::default() },
        ttl: Duration::from_secs(3600),
    }
}

#[test]
fn empty_entries_of_a_certificate_are_dropped() {
    let spec = certificate(
        &["localhost", "{{ .Instance.Hostname }}", "*.{{ .Cluster.ID }}.net"],
        &["{{ .Instance.IP4 }}", "{{ .Instance.IP6 }}"],
    );
    let rendered = render_certificate(&spec, &data()).unwrap();
    assert_eq!(rendered.cn, "system:node:knc1");
    assert_eq!(rendered.dns, ["localhost", "*.c1.net"]);
    assert_eq!(rendered.ip, ["192.0.2.1".parse::<IpAddr>().unwrap()]);
}

#[test]
fn an_invalid_name_in_a_certificate_is_named() {
    let error = render_certificate(&certificate(&["{{ .Vars.Quoted }}"], &[]), &data()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "render certificates.kubelet.dns[0]: certificate kubelet, dns[0]: \"say \\\"hi\\\"\" is not a DNS name"
    );
    let error = render_certificate(&certificate(&[], &["127.0.0.1", "{{ .Vars.Name }}"]), &data()).unwrap_err();
    assert_eq!(error.message, "certificate kubelet, ip[1]: \"web\" is not an IP address");
    let mut spec = certificate(&[], &[]);
    spec.cn = "{{ .Instance.Hostname }}".to_owned();
    assert_eq!(render_certificate(&spec, &data()).unwrap_err().message, "certificate kubelet: cn renders to nothing");
}

proptest! {
    #[test]
    fn no_template_upsets_the_renderer(
        source in "(\\{\\{-? ?|\\{\\{ | ?-?\\}\\}| \\}\\}|if |else|end|range |with |define \"a\"|template \"a\" |\\$x|:= |\\.Vars|\\.Name|\\.|\\(|\\)|\\|| |\"b\"|1|printf|index |default|text|,|/\\*|\\*/){0,24}"
    ) {
        if let Ok(text) = render(&source) {
            prop_assert!(!text.contains("<no value>"));
        }
        if let Ok(program) = Program::parse(&source) {
            program.check_fields(Context::Args);
            program.needed_keys();
        }
    }
}
