//! Log lines: JSON for machines, short text for a terminal.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogForm {
    Text,
    Json,
}

/// Starts logging to standard error. A second call changes nothing, so tests may race for it.
pub fn start(form: LogForm, debug: bool) {
    let level = if debug { "debug" } else { "info" };
    #[cfg(feature = "env-filter")]
    {
        // Ours at the wanted level, the libraries' only when they complain.
        let filter = tracing_subscriber::EnvFilter::try_from_env("NSTANCE_LOG").unwrap_or_else(|_| {
            tracing_subscriber::EnvFilter::new(format!(
                "warn,nstance_server={level},nstance_store={level},nstance_providers={level},nstance_rt={level},\
                 nstance_agent={level},nstance_dev={level},nstance_identity={level}"
            ))
        });
        let builder = tracing_subscriber::fmt().with_writer(std::io::stderr).with_env_filter(filter);
        let _ = match form {
            LogForm::Text => builder.with_target(false).with_ansi(false).try_init(),
            LogForm::Json => builder.json().flatten_event(true).with_current_span(false).try_init(),
        };
    }
    #[cfg(not(feature = "env-filter"))]
    {
        let level = if level == "debug" { tracing::Level::DEBUG } else { tracing::Level::INFO };
        let builder = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(level);
        let _ = match form {
            LogForm::Text => builder.with_target(false).with_ansi(false).try_init(),
            LogForm::Json => builder.json().flatten_event(true).with_current_span(false).try_init(),
        };
    }
}
