//! What the cluster commands say of themselves, and to whoever asks for something that cannot be.

use std::process::{Command, Stdio};

use expect_test::{Expect, expect};

/// Runs the tool with nothing in its environment, in a directory with nothing in it.
fn run(words: &[&str]) -> (i32, String) {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_nstance-admin"))
        .args(words)
        .env_clear()
        .env("NSTANCE_TEMP_DIR", dir.path())
        .env("COLUMNS", "100")
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap()).concat();
    (output.status.code().unwrap(), said.replace(dir.path().to_str().unwrap(), "DIR"))
}

fn check(words: &[&str], exit: i32, expect: Expect) {
    let (code, said) = run(words);
    expect.assert_eq(&said);
    assert_eq!(code, exit, "{words:?}");
}

/// The commands and the flags of their own; those that all share are shown once below.
fn own_help(words: &[&str]) -> String {
    let (code, said) = run(&[words, &["-h"]].concat());
    assert_eq!(code, 0, "{said}");
    let end = ["\nStorage:", "\nShards:", "\nCommon:"].iter().filter_map(|it| said.find(it)).min();
    format!("{}\n", said[..end.unwrap_or(said.len())].trim_end())
}

#[test]
fn cluster_lists_its_commands() {
    expect![[r#"
        Work on the cluster through its bucket, without any server

        Usage: nstance-admin cluster [OPTIONS] <COMMAND>

        Commands:
          nonce              Make a nonce with which one operator may register, once
          register-operator  Make an operator's identity without any server
          rotate-ca          Replace the CA step by step, without anybody noticing
          reencrypt          Seal every secret with the first encryption key
          info               Show the cluster as its bucket knows it: CAs, shards, leaders, operators
          doctor             Check store, secrets and configs, and how well the bucket is kept
          restore            Put back into a lost bucket what a server's cache remembers

        Options:
          -h, --help  Print help (see more with '--help')
    "#]]
    .assert_eq(&own_help(&["cluster"]));
}

#[test]
fn every_command_names_its_own_flags() {
    let all = [
        &["cluster", "nonce"][..],
        &["cluster", "register-operator"],
        &["cluster", "rotate-ca"],
        &["cluster", "reencrypt"],
        &["cluster", "info"],
        &["cert", "list"],
        &["cert", "revoke"],
        &["operator", "list"],
        &["operator", "revoke"],
        &["check"],
    ];
    let text: Vec<String> = all.iter().map(|words| own_help(words)).collect();
    expect![[r#"
        Make a nonce with which one operator may register, once

        Usage: nstance-admin cluster nonce [OPTIONS] --cluster-id <ID>

        Options:
              --cluster-id <ID>    The cluster it is for; a server of another refuses it
              --tenant <TENANT>    The tenant of the operator [default: default]
              --expiry <DURATION>  How long it may be used: 1m to 7d [default: 3h]
              --output <PATH>      Where it is written; `-` prints it [default:
                                   cli-operator-identity/nonce.jwt below --temp-dir]
          -h, --help               Print help (see more with '--help')

        Make an operator's identity without any server

        Usage: nstance-admin cluster register-operator [OPTIONS]

        Options:
              --tenant <TENANT>         The tenant of the operator [default: default]
              --operator-id <ID>        Its id [default: a new one]
              --public-key-file <FILE>  Certify this Ed25519 public key (PEM), whose private half stays
                                        where it is
              --output-dir <DIR>        Where ca.crt, identity.key and identity.crt are written [default:
                                        cli-operator-identity below --temp-dir]
              --cert-ttl-hours <HOURS>  Life of the certificate in hours [default: 720]
          -h, --help                    Print help (see more with '--help')

        Replace the CA step by step, without anybody noticing

        Usage: nstance-admin cluster rotate-ca [OPTIONS]

        Options:
              --activate  Let the new CA issue
              --retire    End the trust of the old CA, and delete its key
              --status    Show where the rotation stands, and change nothing
              --abort     Take a rotation back that was not activated
              --lost-key  The key of the CA is lost: make a new CA that issues at once
              --force     Do it although it cuts somebody off, whom it lists
              --dry-run   Only say what would happen
          -h, --help      Print help (see more with '--help')

        Seal every secret with the first encryption key

        Usage: nstance-admin cluster reencrypt [OPTIONS]

        Options:
              --dry-run  Only say which secrets would be written
          -h, --help     Print help (see more with '--help')

        Show the cluster as its bucket knows it: CAs, shards, leaders, operators

        Usage: nstance-admin cluster info [OPTIONS]

        Options:
          -h, --help  Print help (see more with '--help')

        Show every certificate that was issued, and what it is worth now

        Usage: nstance-admin cert list [OPTIONS]

        Options:
              --subject <TEXT>       Only those whose subject or holder contains this
              --valid                Only those that are still good
              --shard <SHARD>        Only those that this shard issued
              --instance <ID>        Only those of this instance
              --operator <ID>        Only those of this operator
              --expiring <DURATION>  Only good ones that end within this time, as in 7d
          -h, --help                 Print help (see more with '--help')

        End what a certificate is good for

        Usage: nstance-admin cert revoke [OPTIONS] <SERIAL>

        Arguments:
          <SERIAL>  Serial number, as in `cert list`

        Options:
              --reason <REASON>  Why, for whoever reads the record [default: "certificate revoked by hand"]
              --dry-run          Only say what would happen
          -h, --help             Print help (see more with '--help')

        Show who was ever registered as an operator

        Usage: nstance-admin operator list [OPTIONS]

        Options:
          -h, --help  Print help (see more with '--help')

        End an operator's identity for good

        Usage: nstance-admin operator revoke [OPTIONS] <ID>

        Arguments:
          <ID>  Its id, as in `operator list`

        Options:
              --reason <REASON>  Why, for whoever reads the record [default: "revoked by hand"]
              --dry-run          Only say what would happen
          -h, --help             Print help (see more with '--help')

        Check everything, from the clock to the fleet, and say how to repair what is wrong

        Usage: nstance-admin check [OPTIONS]

        Options:
              --pre              Only what must hold before the first server starts: environment, store,
                                 secrets, config
              --wait <DURATION>  Repeat it until nothing fails, for so long at most
              --only <NAME>      Only this group; repeatable [possible values: environment, store, secrets,
                                 config, identity, shards, fleet]
          -h, --help             Print help (see more with '--help')
    "#]]
    .assert_eq(&text.join("\n"));
}

#[test]
fn shared_flags_of_the_store_are_explained() {
    let (_, said) = run(&["cluster", "info", "-h"]);
    let storage = said.split("\nStorage:").nth(1).unwrap().split("\nCommon:").next().unwrap();
    expect![[r#"
        Storage:
              --storage-provider <STORAGE_PROVIDER>
                  Where the cluster's objects are; S3 goes by the usual AWS_ variables [default: s3]
                  [possible values: s3, gcs, azure, file]
              --storage-bucket <BUCKET>
                  Name of the bucket; a directory with --storage-provider file
              --storage-prefix <PREFIX>
                  Where `cluster/` is in the bucket: what stands before it is the server's --prefix
                  [default: cluster/]
              --secrets-provider <SECRETS_PROVIDER>
                  Where secrets are kept [default: object-storage] [possible values: object-storage,
                  aws-secrets-manager, aws-parameter-store, google-secret-manager]
              --secrets-prefix <PREFIX>
                  Where secrets are below `cluster/`, as server.secrets.prefix [default: secret/]
              --secrets-gcp-project <PROJECT>
                  Project of google-secret-manager
              --key-provider <KEY_PROVIDER>
                  Where the encryption key of secrets comes from [default: env] [possible values: env, file,
                  aws-secrets-manager, google-secret-manager]
              --key-source <SOURCE>
                  Name of the variable, or path of the file, that holds the key [default for env:
                  NSTANCE_ENCRYPTION_KEY]
    "#]]
    .assert_eq(&format!("Storage:{storage}"));
}

#[test]
fn a_command_without_a_bucket_says_how_to_name_one() {
    check(
        &["cluster", "info"],
        64,
        expect![[r#"
        error: which bucket? --storage-bucket is missing
        next: --storage-bucket NAME, or NSTANCE_STORAGE_BUCKET, or `storage-bucket:` in admin.yaml
    "#]],
    );
}

#[test]
fn what_this_build_has_not_is_refused() {
    check(
        &["cluster", "info", "--storage-bucket", "b", "--storage-provider", "azure"],
        64,
        expect![[r#"
        error: storage provider azure is not part of this build
        next: --storage-provider s3, which many stores speak, or file
    "#]],
    );
    let keys = ["--storage-provider", "file", "--storage-bucket", ".", "--key-provider", "google-secret-manager"];
    check(
        &[&["cluster", "reencrypt"], &keys[..]].concat(),
        64,
        expect![[r#"
        error: key provider google-secret-manager is not part of this build
        next: --key-provider env or file
    "#]],
    );
}

#[test]
fn wrong_values_are_named() {
    check(
        &["cluster", "nonce", "--cluster-id", "demo", "--expiry", "8d"],
        64,
        expect![[r#"
        error: invalid value '8d' for '--expiry <DURATION>': a nonce lives between 1m and 7d

        For more information, try '--help'.
    "#]],
    );
    check(
        &["cluster", "nonce"],
        64,
        expect![[r#"
        error: the following required arguments were not provided:
          --cluster-id <ID>

        Usage: nstance-admin cluster nonce --cluster-id <ID> --temp-dir <DIR>

        For more information, try '--help'.
    "#]],
    );
    check(
        &["cluster", "rotate-ca", "--activate", "--retire"],
        64,
        expect![[r#"
        error: the argument '--activate' cannot be used with '--retire'

        Usage: nstance-admin cluster rotate-ca --activate --temp-dir <DIR>

        For more information, try '--help'.
    "#]],
    );
    check(
        &["operator", "revoke", "nobody"],
        64,
        expect![[r#"
        error: invalid value 'nobody' for '<ID>': `nobody` is not an operator id: expected three lower-case letters and 26 characters of 0-9 a-z without i, l, o, u

        For more information, try '--help'.
    "#]],
    );
    check(
        &["check", "--only", "everything"],
        64,
        expect![[r#"
        error: invalid value 'everything' for '--only <NAME>'
          [possible values: environment, store, secrets, config, identity, shards, fleet]

        For more information, try '--help'.
    "#]],
    );
    check(
        &["check", "--pre", "--only", "store"],
        64,
        expect![[r#"
        error: the argument '--pre' cannot be used with '--only <NAME>'

        Usage: nstance-admin check --pre --temp-dir <DIR>

        For more information, try '--help'.
    "#]],
    );
    check(
        &["cluster", "info", "--storage-bucket", "b", "--storage-prefix", "prod/"],
        64,
        expect![[r#"
        error: --storage-prefix prod/: it must end with `cluster/`
        next: the server's --prefix followed by cluster/, as in prod/cluster/
    "#]],
    );
}

#[test]
fn an_empty_directory_is_no_cluster() {
    let file = ["--storage-provider", "file", "--storage-bucket", "."];
    check(
        &[&["cluster", "info"], &file[..]].concat(),
        5,
        expect![[r#"
        error: the cluster has no CA yet in file://./
        next: start a nstance-server, whose first start makes the CA and the nonce key; or check the bucket
    "#]],
    );
    check(
        &[&["cluster", "register-operator"], &file[..]].concat(),
        1,
        expect![[r#"
        error: read the encryption key of the cluster's secrets: encryption key from env NSTANCE_ENCRYPTION_KEY is not set
        next: the key of server.secrets.encryption_key, by --key-provider and --key-source
    "#]],
    );
    check(
        &[&["cert", "list"], &file[..]].concat(),
        0,
        expect![[r#"
        SERIAL  SUBJECT  KIND  ISSUED  EXPIRES  STATE
    "#]],
    );
    check(
        &[&["operator", "list"], &file[..]].concat(),
        0,
        expect![[r#"
        OPERATOR  TENANT  STATE  REGISTERED  EXPIRES
    "#]],
    );
}

#[test]
fn a_check_of_nothing_fails_with_a_fix_for_each_line() {
    let file = ["--storage-provider", "file", "--storage-bucket", "."];
    check(
        &[&["check", "--only", "store,secrets,config,identity"], &file[..]].concat(),
        1,
        expect![[r#"
        store
          ok    reachable                  file://./
          ok    write
          ok    create-refuses-existing
          ok    update
          ok    update-refuses-wrong-etag
          ok    update-refuses-missing
          ok    read
          ok    list
          ok    delete
          ok    retried-create             a repeated create finds its own write
          ok    racing-writers             exactly one wins
          ok    clean-up
        secrets
          FAIL  encryption-key             read the encryption key of the cluster's secrets: encryption key from env NSTANCE_ENCRYPTION_KEY is not set
                fix: give the key of server.secrets.encryption_key by --key-provider and --key-source; if it is lost, restore it
          skip  ca-key                     there is no encryption key
          skip  nonce-key                  there is no encryption key
          skip  ca-key-fits                there is no encryption key
        config
          FAIL  shards                     the bucket has no config of any shard
                fix: upload config/SHARD.jsonc; examples/ has some to begin with
        identity
          FAIL  files                      read DIR/cli-operator-identity/ca.crt of the operator identity: No such file or directory (os error 2)
                fix: nstance-admin cluster register-operator
          skip  valid                      there is no usable identity
          skip  trusted                    there is no usable identity
          skip  record                     there is no usable identity
        12 ok, 0 warnings, 3 failed, 6 skipped
    "#]],
    );
}
