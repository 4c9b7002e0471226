//! What `serve` says of itself, and to those who ask it wrongly.

use std::process::Command;

use expect_test::{Expect, expect};

fn check(args: &[&str], expected: Expect) {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_nstance-admin"))
        .arg("serve")
        .args(args)
        .env_clear()
        .env("COLUMNS", "100")
        .env("NSTANCE_TEMP_DIR", dir.path())
        .current_dir(dir.path())
        .output()
        .unwrap();
    let mut said = format!("exit {}\n", output.status.code().unwrap());
    for (name, text) in [("stdout", &output.stdout), ("stderr", &output.stderr)] {
        let text = String::from_utf8_lossy(text).replace(dir.path().to_str().unwrap(), "DIR");
        if !text.is_empty() {
            let lines: String = text.lines().map(|line| format!("{}\n", line.trim_end())).collect();
            said += &format!("--- {name}\n{lines}");
        }
    }
    expected.assert_eq(&said);
}

#[test]
fn help_names_every_flag() {
    check(
        &["--help"],
        expect![[r#"
            exit 0
            --- stdout
            Serve the shards over HTTP, with an OpenAPI document at /openapi.json

            Usage: nstance-admin serve [OPTIONS]

            Options:
                  --bind <ADDRESS:PORT>
                      Where to listen; other addresses than loopback need TLS

                      [default: 127.0.0.1:8080]

                  --token-file <FILE>
                      File with the token that may do everything [default: NSTANCE_ADMIN_TOKEN, else admin-token
                      below --temp-dir, made if it is missing]

                  --viewer-token-file <FILE>
                      File with a token that may only look

                  --tls-cert <FILE>
                      Certificate chain for TLS

                  --tls-key <FILE>
                      Private key for TLS

                  --client-ca <FILE>
                      CA whose client certificates are let in without a token; of the cluster's own only those
                      of operators of our tenant

                  --allowed-host <HOST>
                      Another name under which this server may be called; repeatable

                  --read-only
                      Refuse everything that changes something

                  --insecure-no-auth
                      Let everybody on this machine do everything

                  --behind-proxy
                      A proxy before this server speaks TLS and tells the caller's address in X-Forwarded-For

              -h, --help
                      Print help (see a summary with '-h')

            Shards:
                  --servers <SHARD=HOST:PORT>
                      Operator port of each shard: shard=host:port,...; a shard may have several

                  --shard <SHARD>
                      Only this shard; repeatable

                  --all-shards
                      All shards of --servers

                  --identity-dir <DIR>
                      Directory with ca.crt, identity.key and identity.crt [default: cli-operator-identity below
                      --temp-dir]

                  --timeout <DURATION>
                      How long each shard may take to answer [default: 30s; with --wait 15m]

            Common:
                  --temp-dir <DIR>
                      Where identities and defaults are kept [default: ./temp if it is a development
                      environment, else the state directory]

              -o, --format <FORMAT>
                      Form of the result

                      Possible values:
                      - table: Columns for people
                      - wide:  The same with more columns
                      - json
                      - yaml
                      - name:  Only the names, one per line

                      [default: table]

                  --debug
                      Show the whole chain of causes, and the ids of refused requests in the logs of servers

                  --no-color
                      No colours; also by NO_COLOR

                  --no-progress
                      No lines that redraw themselves

              -y, --yes
                      Do not ask before something is taken away
        "#]],
    );
}

#[test]
fn networks_are_not_served_in_the_clear() {
    check(
        &["--bind", "0.0.0.0:0"],
        expect![[r#"
        exit 64
        --- stderr
        error: tokens would cross the network in the clear to 0.0.0.0:0
        next: --tls-cert and --tls-key, or --behind-proxy if a proxy before this server speaks TLS, or --bind 127.0.0.1:8080
    "#]],
    );
    check(
        &["--bind", "0.0.0.0:0", "--insecure-no-auth"],
        expect![[r#"
        exit 64
        --- stderr
        error: --insecure-no-auth would let everybody in who reaches 0.0.0.0:0
        next: --bind 127.0.0.1:8080, or a token
    "#]],
    );
}

#[test]
fn wrong_usage_is_told() {
    check(
        &["--bind", "nowhere"],
        expect![[r#"
        exit 64
        --- stderr
        error: invalid value 'nowhere' for '--bind <ADDRESS:PORT>': invalid socket address syntax

        For more information, try '--help'.
    "#]],
    );
    check(
        &["--tls-cert", "a.crt"],
        expect![[r#"
        exit 64
        --- stderr
        error: the following required arguments were not provided:
          --tls-key <FILE>

        Usage: nstance-admin serve --tls-cert <FILE> --tls-key <FILE> --temp-dir <DIR>

        For more information, try '--help'.
    "#]],
    );
    check(
        &["--insecure-no-auth", "--token-file", "a"],
        expect![[r#"
        exit 64
        --- stderr
        error: the argument '--insecure-no-auth' cannot be used with '--token-file <FILE>'

        Usage: nstance-admin serve --insecure-no-auth --temp-dir <DIR>

        For more information, try '--help'.
    "#]],
    );
    check(
        &[],
        expect![[r#"
        exit 64
        --- stderr
        error: which servers? --servers is missing
        next: --servers dev-1=HOST:8993, or NSTANCE_SERVERS, or `servers:` in admin.yaml below --temp-dir
    "#]],
    );
    check(
        &["--servers", "dev-1=127.0.0.1:1"],
        expect![[r#"
        exit 6
        --- stderr
        error: read DIR/cli-operator-identity/ca.crt of the operator identity: No such file or directory (os error 2)
        next: nstance-admin cluster register-operator, which makes an identity, or --identity-dir
    "#]],
    );
}
