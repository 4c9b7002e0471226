//! Flags that many commands share, and what follows from them.

use std::{
    io::{self, IsTerminal as _, Write as _},
    path::PathBuf,
    time::Duration,
};

use clap::Args;
use nstance_client::{RenewError, Shards, Targets, renewal};

use crate::{
    exit::Exit,
    failure::Failure,
    identity_files::IdentityFiles,
    output::{Format, Output},
};

/// Of every command.
#[derive(Debug, Clone, Args)]
pub struct Root {
    /// Where identities and defaults are kept [default: ./temp if it is a development environment, else the state directory]
    #[arg(long, global = true, value_name = "DIR", help_heading = "Common")]
    pub temp_dir: Option<PathBuf>,
    /// Form of the result
    #[arg(long, short = 'o', global = true, value_enum, default_value_t = Format::Table, help_heading = "Common")]
    pub format: Format,
    /// Show the whole chain of causes, and the ids of refused requests in the logs of servers
    #[arg(long, global = true, help_heading = "Common")]
    pub debug: bool,
    #[arg(long, global = true, help_heading = "Common", help = "No colours; also by NO_COLOR")]
    pub no_color: bool,
    /// No lines that redraw themselves
    #[arg(long, global = true, help_heading = "Common")]
    pub no_progress: bool,
    /// Do not ask before something is taken away
    #[arg(long, short = 'y', global = true, help_heading = "Common")]
    pub yes: bool,
}

/// What a command has beside its own arguments.
#[derive(Debug, Clone)]
pub struct Context {
    pub output: Output,
    pub temp_dir: PathBuf,
    pub debug: bool,
    pub yes: bool,
}

impl Context {
    pub fn new(root: &Root) -> Self {
        Self {
            output: Output::new(root.format, root.no_color, root.no_progress),
            temp_dir: root.temp_dir.clone().unwrap_or_else(default_temp_dir),
            debug: root.debug,
            yes: root.yes,
        }
    }

    pub fn identity_dir(&self) -> PathBuf {
        self.temp_dir.join("cli-operator-identity")
    }

    /// Says what will happen, and goes on only if somebody wants it.
    pub fn confirm(&self, what: &str) -> Result<(), Failure> {
        self.output.note(what);
        if self.yes {
            return Ok(());
        }
        if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
            return Err(
                Failure::usage("this takes something away and nobody can be asked").next("repeat it with --yes")
            );
        }
        let _ = write!(io::stderr(), "Go on? [y/N] ");
        let mut answer = String::new();
        let read = io::stdin().read_line(&mut answer);
        match (read, answer.trim().to_ascii_lowercase().as_str()) {
            (Ok(_), "y" | "yes") => Ok(()),
            _ => Err(Failure::new(Exit::Interrupted, "nothing was done")),
        }
    }
}

/// `./temp` of a development environment, else the user's state directory.
pub(crate) fn default_temp_dir() -> PathBuf {
    let here = PathBuf::from("temp");
    if here.join("dev-s3").exists() {
        return here;
    }
    let state = std::env::var_os("XDG_STATE_HOME").filter(|it| !it.is_empty()).map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    state.or_else(home).unwrap_or_default().join("nstance")
}

/// Of commands that speak with shards.
#[derive(Debug, Clone, Args)]
pub struct ShardArgs {
    /// Operator port of each shard: shard=host:port,...; a shard may have several
    #[arg(long, value_name = "SHARD=HOST:PORT", help_heading = "Shards")]
    pub servers: Option<Targets>,
    /// Only this shard; repeatable
    #[arg(long, value_name = "SHARD", value_delimiter = ',', help_heading = "Shards", conflicts_with = "all_shards")]
    pub shard: Vec<String>,
    /// All shards of --servers
    #[arg(long, help_heading = "Shards")]
    pub all_shards: bool,
    /// Directory with ca.crt, identity.key and identity.crt [default: cli-operator-identity below --temp-dir]
    #[arg(long, value_name = "DIR", help_heading = "Shards")]
    pub identity_dir: Option<PathBuf>,
    /// How long each shard may take to answer [default: 30s; with --wait 15m]
    #[arg(long, value_name = "DURATION", value_parser = duration, help_heading = "Shards")]
    pub timeout: Option<Duration>,
}

/// Of one question.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// With --wait.
pub const PATIENCE: Duration = Duration::from_secs(15 * 60);

impl ShardArgs {
    /// The shards that --shard names, else all: for commands that only look.
    pub async fn shards(&self, context: &Context) -> Result<Shards, Failure> {
        let all = self.configured(context).await?;
        if self.shard.is_empty() { Ok(all) } else { Ok(all.only(&self.shard)?) }
    }

    /// The same for commands that change something: which shards must be said, unless there is but one.
    pub async fn chosen(&self, context: &Context) -> Result<Shards, Failure> {
        let shards = self.shards(context).await?;
        if self.shard.is_empty() && !self.all_shards && 1 < shards.len() {
            let names: Vec<&str> = shards.names().collect();
            return Err(Failure::usage(format!("there are {} shards: {}", names.len(), names.join(", ")))
                .next("say which: --shard NAME (repeatable) or --all-shards"));
        }
        Ok(shards)
    }

    /// How long to wait with --wait.
    pub fn patience(&self) -> Duration {
        self.timeout.unwrap_or(PATIENCE)
    }

    async fn configured(&self, context: &Context) -> Result<Shards, Failure> {
        let Some(targets) = self.servers.clone() else {
            return Err(Failure::usage("which servers? --servers is missing")
                .next("--servers dev-1=HOST:8993, or NSTANCE_SERVERS, or `servers:` in admin.yaml below --temp-dir"));
        };
        let files = self.identity_files(context);
        let identity = files.load()?;
        if identity.is_expired() {
            let (dir, expiry) = (files.dir().display(), identity.valid_until());
            let what = format!("the operator identity in {dir} expired at {expiry}");
            return Err(Failure::new(Exit::Denied, what).next("nstance-admin cluster register-operator"));
        }
        let shards = Shards::new(targets, identity, self.timeout.unwrap_or(TIMEOUT));
        if shards.identity().is_renewal_due()
            && let Err(error) = renewal::renew(&shards, &files).await
        {
            note_not_renewed(context, &files, error);
        }
        Ok(shards)
    }

    /// Where the identity is, which a process that runs for long renews.
    pub(crate) fn identity_files(&self, context: &Context) -> IdentityFiles {
        IdentityFiles::new(self.identity_dir.clone().unwrap_or_else(|| context.identity_dir()))
    }
}

/// With --wait the timeout is how long to follow; each request still has at most the usual time.
pub(crate) fn limit_requests(shards: Shards, waits: bool) -> Shards {
    if waits { shards.with_timeout_at_most(TIMEOUT) } else { shards }
}

/// Renews the identity of a process that runs for long. Never ends.
pub(crate) async fn keep_identity_renewed(context: Context, files: IdentityFiles, shards: Shards) {
    renewal::keep_renewed(&shards, &files, |error| note_not_renewed(&context, &files, error)).await;
}

/// The old certificate is still valid, so the command goes on.
fn note_not_renewed(context: &Context, files: &IdentityFiles, error: RenewError) {
    let why = match error {
        RenewError::TimedOut { .. } => error.to_string(),
        error => files.renewal_failure(error).lines(false).join("; "),
    };
    context.output.note(&format!("note: the operator certificate could not be renewed: {why}"));
}

/// As in configs: `90s`, `15m`, `7d`.
pub fn duration(text: &str) -> Result<Duration, String> {
    nstance_config::duration::parse(text).map_err(|error| error.to_string())
}

/// `key=value`.
pub fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("`{text}`: expected KEY=VALUE"))?;
    if key.is_empty() {
        return Err(format!("`{text}`: there is no key before the `=`"));
    }
    Ok((key.to_owned(), value.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_shard_has_as_long_as_was_said_and_while_one_waits_for_more_the_usual_time() {
        let dir = tempfile::tempdir().unwrap();
        crate::serve::tests::identity(dir.path());
        let context = Context {
            output: Output::new(Format::Table, true, true),
            temp_dir: dir.path().to_owned(),
            debug: false,
            yes: false,
        };
        let shards = async |seconds: Option<u64>| {
            let args = ShardArgs {
                servers: Some("dev-1=127.0.0.1:1".parse().unwrap()),
                shard: Vec::new(),
                all_shards: false,
                identity_dir: Some(dir.path().to_owned()),
                timeout: seconds.map(Duration::from_secs),
            };
            args.shards(&context).await.unwrap()
        };
        assert_eq!(shards(None).await.timeout(), TIMEOUT);
        assert_eq!(shards(Some(2)).await.timeout(), Duration::from_secs(2));
        assert_eq!(shards(Some(120)).await.timeout(), Duration::from_secs(120));
        assert_eq!(limit_requests(shards(Some(120)).await, false).timeout(), Duration::from_secs(120));
        assert_eq!(limit_requests(shards(Some(120)).await, true).timeout(), TIMEOUT);
        assert_eq!(limit_requests(shards(Some(2)).await, true).timeout(), Duration::from_secs(2));
    }
}
