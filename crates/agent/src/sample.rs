//! Host metrics: raw counters of the kernel, read every ten seconds into a ring, and windows made of differences.
//!
//! A sample allocates nothing: the ring and the read buffer are made once. What the kernel does not tell stays unset,
//! and no report ever fails for it. Counters that start anew, or are gone for a while, count as standing still: a sum
//! in a report is never negative and a share never beyond its bounds.

use std::{convert::Infallible, fs::File, io::Read as _, path::Path, time::Duration};

use nstance_core::time::Timestamp;
use nstance_proto::v1::{HealthReportRequest, Metrics};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

use crate::{context::Context, health::wire_time, host::Host};

mod parse;

const PERIOD: Duration = Duration::from_secs(10);

/// Fifteen minutes have 90 periods, and so 91 edges.
const N_SAMPLES: usize = 91;

/// The windows in periods: one, five and fifteen minutes.
const WINDOWS: [usize; 3] = [6, 30, 90];

/// A machine with more tells of its first ones.
pub(crate) const MAX_CORES: usize = 256;

/// What is read of a file at most. The longest, `/proc/stat`, has its processors first.
const MAX_FILE: usize = 64 * 1024;

pub(crate) async fn watch(ctx: &Context) -> Infallible {
    if !ctx.parts.host.is_somewhere() {
        return std::future::pending().await;
    }
    let mut reader = Reader::default();
    let mut ticks = interval_at(Instant::now(), PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        reader.read(&ctx.parts.host, ctx.now());
        ctx.board.samples().push(&reader.sample, &reader.cores);
        // Addresses change seldom and tell nobody; a wake-up that is there anyway does.
        ctx.look_around();
    }
}

/// Busy and total time of a processor, in ticks. They wrap, which their differences survive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CoreTicks {
    pub(crate) busy: u32,
    pub(crate) total: u32,
}

/// What was read at one moment. Sums only grow; see [`Growing`].
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Sample {
    at: Option<Timestamp>,
    cpu_busy: Option<u64>,
    cpu_total: u64,
    memory_used: Option<f64>,
    received: Option<u64>,
    sent: Option<u64>,
    disk_read: Option<u64>,
    disk_written: Option<u64>,
    disk_used: Option<f64>,
    inodes_used: Option<f64>,
}

/// A counter that never goes back, made of one that may.
#[derive(Debug, Clone, Copy, Default)]
struct Growing {
    raw: Option<u64>,
    sum: u64,
}

impl Growing {
    fn take(&mut self, raw: Option<u64>) -> Option<u64> {
        if let Some(raw) = raw {
            let grown = self.raw.map_or(0, |before| raw.saturating_sub(before));
            self.sum = self.sum.saturating_add(grown);
            self.raw = Some(raw);
        }
        raw.map(|_| self.sum)
    }
}

/// Reads samples; keeps the buffers.
#[derive(Default)]
struct Reader {
    buffer: Vec<u8>,
    cores: Vec<CoreTicks>,
    sample: Sample,
    cpu_busy: Growing,
    cpu_total: Growing,
    received: Growing,
    sent: Growing,
    disk_read: Growing,
    disk_written: Growing,
}

impl Reader {
    fn read(&mut self, host: &Host, now: Timestamp) {
        let mut sample = Sample { at: Some(now), ..Sample::default() };
        self.cores.clear();
        let cpu = self.file(host, "/proc/stat").and_then(|_| parse::cpu(&self.buffer, &mut self.cores));
        sample.cpu_busy = self.cpu_busy.take(cpu.map(|(busy, _)| busy));
        sample.cpu_total = self.cpu_total.take(cpu.map(|(_, total)| total)).unwrap_or(0);
        sample.memory_used = self.file(host, "/proc/meminfo").and_then(|_| parse::memory(&self.buffer));
        let network = self.file(host, "/proc/net/dev").and_then(|_| parse::network(&self.buffer));
        sample.received = self.received.take(network.map(|(received, _)| received));
        sample.sent = self.sent.take(network.map(|(_, sent)| sent));
        let disks = self.file(host, "/proc/diskstats").and_then(|_| parse::disks(&self.buffer));
        sample.disk_read = self.disk_read.take(disks.map(|(read, _)| read));
        sample.disk_written = self.disk_written.take(disks.map(|(_, written)| written));
        (sample.disk_used, sample.inodes_used) = host.path("/").map_or((None, None), |root| root_disk(&root));
        self.sample = sample;
    }

    /// Fills the buffer with the beginning of a file.
    fn file(&mut self, host: &Host, path: &str) -> Option<()> {
        self.buffer.clear();
        let file = File::open(host.path(path)?).ok()?;
        file.take(MAX_FILE as u64).read_to_end(&mut self.buffer).ok()?;
        Some(())
    }
}

/// How full the root file system is, in blocks and in inodes, in per cent, as `df` counts.
fn root_disk(root: &Path) -> (Option<f64>, Option<f64>) {
    let Ok(disk) = rustix::fs::statvfs(root) else { return (None, None) };
    let used = disk.f_blocks.saturating_sub(disk.f_bfree);
    let blocks = share(used, used.saturating_add(disk.f_bavail));
    (blocks, share(disk.f_files.saturating_sub(disk.f_ffree), disk.f_files))
}

/// `part` of `whole` in per cent; `None` of nothing.
#[allow(clippy::cast_precision_loss, reason = "a share does not need sixty bits")]
pub(crate) fn share(part: u64, whole: u64) -> Option<f64> {
    (0 < whole).then(|| 100.0 * (part.min(whole) as f64 / whole as f64))
}

/// The last fifteen minutes.
#[derive(Default)]
pub(crate) struct Samples {
    /// Made with the first sample, and never larger than [`N_SAMPLES`].
    ring: Vec<Sample>,
    /// Of all samples, `n_cores` each.
    cores: Vec<CoreTicks>,
    n_cores: usize,
    /// Where the next one goes.
    next: usize,
}

impl Samples {
    fn push(&mut self, sample: &Sample, cores: &[CoreTicks]) {
        if self.ring.is_empty() || self.n_cores != cores.len() {
            // A processor came or went: what was is of another machine, so to say.
            *self = Self { n_cores: cores.len(), ..Self::default() };
            self.ring.reserve_exact(N_SAMPLES);
            self.cores.resize(N_SAMPLES * cores.len(), CoreTicks::default());
        }
        if self.ring.len() < N_SAMPLES {
            self.ring.push(*sample);
        } else {
            self.ring[self.next] = *sample;
        }
        let from = self.next * self.n_cores;
        self.cores[from..from + self.n_cores].copy_from_slice(cores);
        self.next = (self.next + 1) % N_SAMPLES;
    }

    /// The place of the sample that lies `back` periods behind the newest, or of the oldest.
    fn place(&self, back: usize) -> usize {
        let back = back.min(self.ring.len().saturating_sub(1));
        (self.next + N_SAMPLES - 1 - back) % N_SAMPLES
    }

    fn cores_at(&self, place: usize) -> &[CoreTicks] {
        &self.cores[place * self.n_cores..(place + 1) * self.n_cores]
    }

    /// Puts the windows into a report. There are none before the second sample.
    pub(crate) fn fill(&self, report: &mut HealthReportRequest) {
        if self.ring.len() < 2 {
            return;
        }
        let [one, five, fifteen] = WINDOWS.map(|periods| self.window(periods));
        (report.one_minute, report.five_minutes, report.fifteen_minutes) = (Some(one), Some(five), Some(fifteen));
        report.window_start = self.ring[self.place(N_SAMPLES)].at.map(wire_time);
        report.window_end = self.ring[self.place(0)].at.map(wire_time);
    }

    #[allow(clippy::cast_precision_loss, reason = "the wire has doubles, and bytes of fifteen minutes fit")]
    fn window(&self, periods: usize) -> Metrics {
        let (from, to) = (self.place(periods), self.place(0));
        let (old, new) = (&self.ring[from], &self.ring[to]);
        let grown = |of: fn(&Sample) -> Option<u64>| match (of(old), of(new)) {
            (Some(old), Some(new)) => new.saturating_sub(old),
            _ => 0,
        };
        let cores = self.cores_at(from).iter().zip(self.cores_at(to));
        Metrics {
            cpu_usage: share(grown(|it| it.cpu_busy), new.cpu_total.saturating_sub(old.cpu_total)).unwrap_or(0.0),
            cpu_core_usage: cores.map(|(old, new)| core_usage(*old, *new)).collect(),
            memory_usage: new.memory_used.unwrap_or(0.0),
            network_bytes_sent: grown(|it| it.sent) as f64,
            network_bytes_received: grown(|it| it.received) as f64,
            disk_used: new.disk_used.unwrap_or(0.0),
            disk_inodes_used: new.inodes_used.unwrap_or(0.0),
            disk_bytes_read: grown(|it| it.disk_read) as f64,
            disk_bytes_written: grown(|it| it.disk_written) as f64,
        }
    }
}

fn core_usage(old: CoreTicks, new: CoreTicks) -> f64 {
    // Over half the range is no growth but a step back: the kernel's idle times do that now and then.
    let grown = |old: u32, new: u32| Some(new.wrapping_sub(old)).filter(|by| *by <= u32::MAX / 2).unwrap_or(0);
    share(grown(old.busy, new.busy).into(), grown(old.total, new.total).into()).unwrap_or(0.0)
}

#[cfg(test)]
#[path = "sample/tests.rs"]
mod tests;
