//! A real Kubernetes API server for tests: etcd and kube-apiserver as programs on loopback.
//!
//! The programs come from the directory that `KUBEBUILDER_ASSETS` names (`make kubernetes-tools` builds them). Each
//! server has its own CA, ports and data, RBAC is on, and callers show client certificates. Where the programs are
//! missing, tests say in one loud line that they did not run; a server that is there but does not start is an error.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use nstance_devk8s::real::RealApi;
//!
//! let Some(api) = RealApi::shared().await else { return Ok(()) };
//! let kubeconfig = api.kubeconfig_for("alice", &["developers"])?;
//! # Ok(())
//! # }
//! ```

mod assets;
mod flags;
mod pki;
mod program;

use std::{
    fs, io,
    io::Write as _,
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Once,
    time::Duration,
};

use anyhow::{Context as _, bail};
use nstance_core::{
    ports::clock::{Clock as _, random},
    time::Mono,
};
use nstance_rt::{clock::SystemClock, entropy::SystemEntropy};
use tokio::sync::OnceCell;

pub use self::assets::{Assets, AssetsError, Program};
use self::{
    flags::Ports,
    pki::Pki,
    program::{Running, Watchdog},
};

/// How long all programs together may take to become ready. Five to ten seconds were measured on two busy cores.
const READY_DEADLINE: Duration = Duration::from_secs(60);

/// Between two looks at a program that is not ready yet.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Another process may take a port between our choice and the program's start.
const MAX_TRIES: u32 = 3;

/// Which programs to start, and with which flags beyond those they need.
#[derive(Debug, Clone, Default)]
pub struct Setup {
    controller_manager: bool,
    scheduler: bool,
    flags: Vec<(Program, String)>,
}

impl Setup {
    /// etcd and kube-apiserver alone: nothing collects garbage, pods need no service account, and roles that are
    /// aggregated from others (`view`, `edit`, `admin`) have no rules.
    pub fn new() -> Self {
        Self::default()
    }

    /// Kubernetes' own controllers: garbage collection, namespaces, aggregated roles, disruption budgets, workloads,
    /// node life cycle.
    pub fn with_controller_manager(mut self) -> Self {
        self.controller_manager = true;
        self
    }

    pub fn with_scheduler(mut self) -> Self {
        self.scheduler = true;
        self
    }

    /// Adds a flag, such as `--node-monitor-grace-period=5s`.
    pub fn with_flag(mut self, program: Program, flag: impl Into<String>) -> Self {
        self.flags.push((program, flag.into()));
        self
    }

    fn programs(&self) -> impl Iterator<Item = Program> {
        let controller_manager = self.controller_manager.then_some(Program::ControllerManager);
        let scheduler = self.scheduler.then_some(Program::Scheduler);
        [Program::Etcd, Program::ApiServer].into_iter().chain(controller_manager).chain(scheduler)
    }

    fn assets(&self) -> Result<Assets, AssetsError> {
        let assets = Assets::from_env()?;
        self.programs().try_for_each(|program| assets.program(program).map(drop))?;
        Ok(assets)
    }

    /// Starts the programs with their data below `dir` and waits until they are ready.
    pub async fn start(&self, dir: &Path) -> anyhow::Result<RealApi> {
        self.start_with(&self.assets()?, dir, Afterwards::Keep).await
    }

    /// As [`Setup::start`]; where a program is missing it says so loudly and gives `None`.
    pub async fn start_if_built(&self, dir: &Path) -> anyhow::Result<Option<RealApi>> {
        match self.assets() {
            Ok(assets) => self.start_with(&assets, dir, Afterwards::Keep).await.map(Some),
            Err(missing) => {
                // The test harness names each test's thread after it.
                say_not_tested(std::thread::current().name().unwrap_or("a test"), &missing);
                Ok(None)
            }
        }
    }

    async fn start_with(&self, assets: &Assets, dir: &Path, afterwards: Afterwards) -> anyhow::Result<RealApi> {
        let mut n_tries = 0;
        loop {
            n_tries += 1;
            match self.start_once(assets, dir, afterwards).await {
                Err(error) if n_tries < MAX_TRIES && format!("{error:#}").contains("address already in use") => (),
                done => return done,
            }
        }
    }

    async fn start_once(&self, assets: &Assets, dir: &Path, afterwards: Afterwards) -> anyhow::Result<RealApi> {
        create_private_dir(dir)?;
        let dir = &dir.canonicalize().with_context(|| format!("resolve {}", dir.display()))?;
        for child in ["pki", "log", "etcd"] {
            create_private_dir(&dir.join(child))?;
        }
        let ports = Ports::free().context("choose free ports on loopback")?;
        let pki = Pki::create(&dir.join("pki")).context("make the API server's certificates")?;
        let watchdog = Watchdog::start(match afterwards {
            Afterwards::Keep => None,
            Afterwards::Remove => Some(dir),
        })
        .context("start the shell that ends the programs with this process")?;
        let mut api = RealApi { dir: dir.to_owned(), ports, pki, running: Vec::new(), watchdog };
        write_private(&api.kubeconfig_path(), api.kubeconfig()?.as_bytes())?;
        for (program, file, user) in [
            (Program::ControllerManager, "kube-controller-manager.kubeconfig", "system:kube-controller-manager"),
            (Program::Scheduler, "kube-scheduler.kubeconfig", "system:kube-scheduler"),
        ] {
            if self.programs().any(|it| it == program) {
                write_private(&dir.join("pki").join(file), api.kubeconfig_for(user, &[])?.as_bytes())?;
            }
        }

        let began = SystemClock.monotonic();
        let http = api.http_client()?;
        // etcd and the API server start together; the others end if the API server is not ready.
        api.spawn(self, assets, Program::Etcd)?;
        api.spawn(self, assets, Program::ApiServer)?;
        api.wait_for(&http, format!("{}/readyz", api.url()), began).await?;
        for program in self.programs().skip(2) {
            api.spawn(self, assets, program)?;
            let url = format!("https://127.0.0.1:{}/healthz", api.ports.of(program));
            api.wait_for(&http, url, began).await?;
        }
        if self.controller_manager {
            // Without it, pods are refused in the namespace `default`.
            let url = format!("{}/api/v1/namespaces/default/serviceaccounts/default", api.url());
            api.wait_for(&http, url, began).await?;
        }
        Ok(api)
    }
}

/// What becomes of the directory when the server is stopped or its process dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Afterwards {
    Keep,
    Remove,
}

/// A running API server. Its programs end when it is dropped, and when the process that started it dies in any way.
#[derive(Debug)]
pub struct RealApi {
    dir: PathBuf,
    ports: Ports,
    pki: Pki,
    // Before the watchdog, so that the programs have ended when it looks for them.
    running: Vec<Running>,
    watchdog: Watchdog,
}

impl RealApi {
    /// Starts etcd and kube-apiserver with their data below `dir`, which stays afterwards.
    pub async fn start(dir: &Path) -> anyhow::Result<Self> {
        Setup::new().start(dir).await
    }

    /// The one server of this process, started on first use; it ends, with its directory, when the process does.
    ///
    /// `None`, and one loud line on stderr, where the programs are missing. Tests share the server, so each must use
    /// names of its own.
    ///
    /// # Panics
    /// If the programs are there but the server does not start: tests must not pass for that reason.
    pub async fn shared() -> Option<&'static Self> {
        static SHARED: OnceCell<Result<Option<RealApi>, String>> = OnceCell::const_new();
        let shared = SHARED.get_or_init(|| async {
            let setup = Setup::new();
            let assets = match setup.assets() {
                Ok(assets) => assets,
                Err(missing) => {
                    say_not_tested("tests on the shared server", &missing);
                    return Ok(None);
                }
            };
            let name = u64::from_le_bytes(random(&SystemEntropy::new()));
            let dir = std::env::temp_dir().join(format!("nstance-real-api-{name:016x}"));
            let started = setup.start_with(&assets, &dir, Afterwards::Remove).await;
            started.map(Some).map_err(|error| format!("{error:#}"))
        });
        match shared.await {
            Ok(api) => api.as_ref(),
            Err(error) => panic!("start the real API server: {error}"),
        }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.ports.of(Program::ApiServer))
    }

    /// The certificate that the server's own certificate is signed by, as PEM.
    pub fn ca_pem(&self) -> &str {
        self.pki.ca_pem()
    }

    /// The text of a kubeconfig for the cluster's administrator.
    pub fn kubeconfig(&self) -> anyhow::Result<String> {
        self.kubeconfig_for("admin", &["system:masters"])
    }

    /// Where the administrator's kubeconfig lies, for kubectl.
    pub fn kubeconfig_path(&self) -> PathBuf {
        self.dir.join("admin.kubeconfig")
    }

    /// The text of a kubeconfig with a fresh client certificate. The user has the rights that RBAC gives to the name
    /// and groups, none at first.
    pub fn kubeconfig_for(&self, user: &str, groups: &[&str]) -> anyhow::Result<String> {
        self.pki.kubeconfig(&self.url(), user, groups)
    }

    /// The process of a program that was started.
    pub fn pid(&self, program: Program) -> Option<u32> {
        self.running.iter().find(|it| it.program() == program).map(Running::pid)
    }

    /// Ends the programs in order and waits for them.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        while let Some(mut program) = self.running.pop() {
            program.stop().await?;
        }
        Ok(())
    }

    fn spawn(&mut self, setup: &Setup, assets: &Assets, program: Program) -> anyhow::Result<()> {
        let mut args = match program {
            Program::Etcd => flags::etcd(&self.dir, &self.ports),
            Program::ApiServer => {
                let accounts = if setup.controller_manager { flags::Accounts::Made } else { flags::Accounts::None };
                flags::api_server(&self.dir, &self.ports, accounts)
            }
            Program::ControllerManager => flags::controller_manager(&self.dir, &self.ports),
            Program::Scheduler => flags::scheduler(&self.dir, &self.ports),
        };
        args.extend(setup.flags.iter().filter(|(of, _)| *of == program).map(|(_, flag)| flag.clone()));
        let path = assets.program(program)?;
        let running =
            self.watchdog.spawn(program, &path, &args, &self.dir).with_context(|| format!("start {program}"))?;
        self.running.push(running);
        Ok(())
    }

    /// Knows the server's CA and shows the administrator's certificate.
    fn http_client(&self) -> anyhow::Result<reqwest::Client> {
        // An error means that this process has one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let identity = reqwest::Identity::from_pem(self.pki.client_pem("admin", &["system:masters"])?.as_bytes())?;
        let ca = reqwest::Certificate::from_pem(self.ca_pem().as_bytes())?;
        let client = reqwest::Client::builder().no_proxy().tls_certs_only([ca]).identity(identity);
        Ok(client.timeout(Duration::from_secs(5)).build()?)
    }

    /// Waits until `url` answers with success. The last program started is the one that does not answer.
    async fn wait_for(&mut self, http: &reqwest::Client, url: String, began: Mono) -> anyhow::Result<()> {
        loop {
            let answer = match http.get(&url).send().await {
                Ok(answer) if answer.status().is_success() => return Ok(()),
                Ok(answer) => format!("HTTP status {}", answer.status()),
                Err(error) => format!("{:#}", anyhow::Error::new(error)),
            };
            for program in &mut self.running {
                if let Some(status) = program.ended()? {
                    bail!("{} ended with {status}; the end of {}", program.program(), program.log_tail());
                }
            }
            if READY_DEADLINE <= SystemClock.monotonic().since(began) {
                let program = self.running.last().context("no program was started")?;
                let seconds = READY_DEADLINE.as_secs();
                bail!("{url} is not ready after {seconds} s: {answer}; the end of {}", program.log_tail());
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// One line for all tests where there are no programs at all, else one for each. Not by `eprintln!`, which the test
/// harness hides when the test passes.
fn say_not_tested(which: &str, missing: &AssetsError) {
    static NO_PROGRAMS: Once = Once::new();
    let say = |which: &str| drop(writeln!(io::stderr(), "NOT TESTED ON A REAL API SERVER: {which}: {missing}"));
    match missing {
        AssetsError::Unset => NO_PROGRAMS.call_once(|| say("every test in a module real_api")),
        AssetsError::Missing { .. } => say(which),
    }
}

fn create_private_dir(dir: &Path) -> anyhow::Result<()> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.with_context(|| format!("create directory {}", dir.display()))
}

fn write_private(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(content)).with_context(|| format!("write {}", path.display()))
}
