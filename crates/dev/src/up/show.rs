//! What a running `up` shows: a picture that is drawn over on a terminal, plain lines elsewhere.

use std::{
    collections::VecDeque,
    io::{self, Write as _},
};

use nstance_core::{ports::clock::Clock as _, time::Mono};
use nstance_proto::v1::Event;
use nstance_rt::clock::SystemClock;

use crate::{
    feed::Picture,
    kubernetes,
    layout::Layout,
    screen::Screen,
    status::{clock_text, compose},
    table,
};

const N_EVENTS: usize = 8;

pub(super) struct Show {
    screen: Option<Screen>,
    since: Mono,
    recent: VecDeque<String>,
}

impl Show {
    pub(super) fn begin() -> Self {
        Self { screen: Screen::on_terminal(), since: SystemClock.monotonic(), recent: VecDeque::new() }
    }

    pub(super) fn event(&mut self, shard: &str, event: &Event) {
        self.line(table::event(shard, event));
    }

    /// Something the supervisor itself has to say.
    pub(super) fn note(&mut self, text: &str) {
        let time = table::time_of_day(SystemClock.now().as_millis());
        self.line(format!("{time}  {text}"));
    }

    fn line(&mut self, line: String) {
        if self.screen.is_none() {
            let mut out = io::stdout().lock();
            // Nobody reading any more is no reason to end.
            let _ = writeln!(out, "{line}");
            let _ = out.flush();
            return;
        }
        self.recent.push_back(line);
        while N_EVENTS < self.recent.len() {
            self.recent.pop_front();
        }
    }

    pub(super) fn draw(&mut self, layout: &Layout, picture: &Picture) {
        let Some(screen) = &mut self.screen else { return };
        if picture.shards.is_empty() {
            return;
        }
        let status = compose(layout, picture);
        let up = clock_text(self.since, SystemClock.monotonic());
        let mut lines =
            vec![format!("nstance-dev  dir={}  provider={}  up {up}", layout.shown(), status.provider), String::new()];
        lines.extend(table::shards(&status));
        lines.extend(status.kubernetes.as_ref().map(kubernetes::line));
        lines.push(String::new());
        let servers = table::servers(&status);
        if 2 < servers.len() {
            lines.extend(servers);
            lines.push(String::new());
        }
        // All that a screen has room for besides the rest.
        let (_, height) = Screen::size();
        let faults = status.faults.iter().map(|it| it.what.clone());
        let blocked = status.kubernetes.iter().flat_map(kubernetes::blocked);
        let warnings: Vec<String> =
            status.problems.iter().cloned().chain(table::holds(&status)).chain(blocked).chain(faults).collect();
        let most = height.saturating_sub(lines.len() + self.recent.len() + warnings.len() + 8).max(1);
        lines.extend(table::instances(&status, most));
        lines.push(String::new());
        lines.extend(warnings.iter().map(|warning| format!("!     {warning}")));
        lines.extend(self.recent.iter().map(|line| format!("last  {line}")));
        lines.push(String::new());
        let flag = layout.dir_flag();
        // As it was called, so that the line can be copied: `make dev` runs a program that is in no PATH.
        let program = std::env::args().next().unwrap_or_else(|| "nstance-dev".to_owned());
        let example = status.instances.first().map_or("ID", |it| it.id.as_str());
        if let Some(kubeconfig) = &status.urls.kubeconfig {
            let file = layout.short(kubeconfig.as_ref());
            lines.push(format!("try   kubectl --kubeconfig {file} get machinepools,nmp,nsg,nm,nodes"));
        }
        lines.push(format!("try   {program} kill instance/{example}{flag}"));
        lines.push(format!(
            "try   {program} kill shard/dev-1{flag}    {program} logs -f{flag}    Ctrl-C stops, state stays"
        ));
        screen.draw(&lines);
    }

    /// The last picture stays; what follows is plain text below it.
    pub(super) fn end(self) {
        drop(self.screen);
    }
}
