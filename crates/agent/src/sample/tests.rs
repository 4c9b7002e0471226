use std::fs;

use nstance_rt::entropy::SeededEntropy;

use super::*;

struct Machine {
    dir: tempfile::TempDir,
    host: Host,
    reader: Reader,
    samples: Samples,
    n_samples: i64,
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("proc/net")).unwrap();
        let host = Host::at(dir.path());
        Self { dir, host, reader: Reader::default(), samples: Samples::default(), n_samples: 0 }
    }

    fn put(&self, name: &str, text: &str) {
        fs::write(self.dir.path().join("proc").join(name), text).unwrap();
    }

    /// Two processors of which one is idle, a network and a disk, all after `seconds` of steady work.
    fn work(&self, seconds: u64) {
        let (busy, idle) = (50 * seconds, 100 * seconds);
        let half = 50 * seconds;
        self.put(
            "stat",
            &format!(
                "cpu  {busy} 0 0 {} 0 0 0 0\ncpu0 {busy} 0 0 {half} 0 0 0 0\ncpu1 0 0 0 {idle} 0 0 0 0\n",
                half + idle
            ),
        );
        self.put("net/dev", &format!("eth0: {} 0 0 0 0 0 0 0 {} 0 0 0 0 0 0 0\n", 1000 * seconds, 100 * seconds));
        self.put("diskstats", &format!("8 0 sda 1 0 {} 0 1 0 {} 0 0 0 0\n", 2 * seconds, 4 * seconds));
        self.put("meminfo", "MemTotal: 1000 kB\nMemAvailable: 400 kB\n");
    }

    fn sample(&mut self) {
        self.reader.read(&self.host, Timestamp::from_millis(10_000 * self.n_samples));
        self.n_samples += 1;
        self.samples.push(&self.reader.sample, &self.reader.cores);
    }

    fn report(&self) -> HealthReportRequest {
        let mut report = HealthReportRequest::default();
        self.samples.fill(&mut report);
        report
    }
}

fn windows(report: &HealthReportRequest) -> [&Metrics; 3] {
    [&report.one_minute, &report.five_minutes, &report.fifteen_minutes].map(|window| window.as_ref().unwrap())
}

#[test]
fn windows_are_differences_at_their_edges() {
    let mut machine = Machine::new();
    for n in 0..200 {
        machine.work(10 * n);
        machine.sample();
    }
    let report = machine.report();
    for (window, seconds) in windows(&report).into_iter().zip([60.0, 300.0, 900.0]) {
        assert_eq!(window.cpu_usage, 25.0);
        assert_eq!(window.cpu_core_usage, [50.0, 0.0]);
        assert_eq!(window.memory_usage, 60.0);
        assert_eq!((window.network_bytes_received, window.network_bytes_sent), (1000.0 * seconds, 100.0 * seconds));
        assert_eq!((window.disk_bytes_read, window.disk_bytes_written), (1024.0 * seconds, 2048.0 * seconds));
        assert!(0.0 < window.disk_used && window.disk_used <= 100.0);
    }
    assert_eq!(report.window_end.unwrap().seconds, 1990);
    assert_eq!(report.window_start.unwrap().seconds, 1090);
}

#[test]
fn there_is_no_window_before_the_second_sample_and_a_short_one_after_it() {
    let mut machine = Machine::new();
    assert!(machine.report().one_minute.is_none());
    machine.work(0);
    machine.sample();
    assert!(machine.report().one_minute.is_none() && machine.report().window_end.is_none());
    machine.work(10);
    machine.sample();
    let report = machine.report();
    assert!(windows(&report).iter().all(|window| window.network_bytes_received == 10_000.0));
    assert_eq!((report.window_start.unwrap().seconds, report.window_end.unwrap().seconds), (0, 10));
}

#[test]
fn missing_sources_leave_their_fields_unset() {
    let mut machine = Machine::new();
    machine.put("meminfo", "MemTotal: 1000 kB\nMemAvailable: 400 kB\n");
    machine.sample();
    machine.sample();
    let report = machine.report();
    let window = windows(&report)[0];
    assert_eq!((window.cpu_usage, window.network_bytes_sent, window.disk_bytes_read), (0.0, 0.0, 0.0));
    assert!(window.cpu_core_usage.is_empty());
    assert_eq!(window.memory_usage, 60.0);
}

#[test]
fn counter_that_starts_anew_loses_one_step_and_no_more() {
    let mut machine = Machine::new();
    for n in 0..4 {
        machine.work(1_000_000 + 10 * n);
        machine.sample();
    }
    for n in 0..4 {
        machine.work(10 * n);
        machine.sample();
    }
    let report = machine.report();
    // Seven steps lie between eight samples, and six in the minute; one of them is the reset.
    assert_eq!(windows(&report)[0].network_bytes_received, 50_000.0);
    assert_eq!(windows(&report)[1].network_bytes_received, 60_000.0);
    assert_eq!(windows(&report)[1].cpu_usage, 25.0);
}

#[test]
fn source_that_goes_and_comes_back_is_bridged() {
    let mut machine = Machine::new();
    machine.work(10);
    machine.sample();
    fs::remove_file(machine.dir.path().join("proc/net/dev")).unwrap();
    machine.sample();
    assert_eq!(windows(&machine.report())[0].network_bytes_received, 0.0);
    machine.work(30);
    machine.sample();
    assert_eq!(windows(&machine.report())[0].network_bytes_received, 20_000.0);
}

#[test]
fn processors_that_come_start_the_windows_anew() {
    let mut machine = Machine::new();
    machine.work(10);
    machine.sample();
    machine.work(20);
    machine.sample();
    machine.put("stat", "cpu 1 1 1 1\ncpu0 1 1 1 1\n");
    machine.sample();
    assert!(machine.report().one_minute.is_none());
}

#[test]
fn wrapped_core_counters_are_bridged() {
    let old = CoreTicks { busy: u32::MAX - 9, total: u32::MAX - 19 };
    assert_eq!(core_usage(old, CoreTicks { busy: 15, total: 30 }), 50.0);
    assert_eq!(core_usage(CoreTicks { busy: 100, total: 200 }, CoreTicks { busy: 90, total: 210 }), 0.0);
}

/// Whatever the kernel says, and however it jumps.
#[test]
fn no_number_is_ever_negative_or_not_a_number() {
    use nstance_core::ports::clock::random;
    let dice = SeededEntropy::new(5);
    let draw = || {
        let bits = u64::from_le_bytes(random::<8>(&dice));
        // Small, large, and at the edge of what fits.
        match bits % 4 {
            0 => bits >> 54,
            1 => bits >> 30,
            2 => u64::MAX - (bits >> 54),
            _ => 0,
        }
    };
    let mut machine = Machine::new();
    for _ in 0..400 {
        let row = |n: usize| (0..n).map(|_| draw().to_string()).collect::<Vec<_>>().join(" ");
        machine.put("stat", &format!("cpu  {}\ncpu0 {}\ncpu1 {}\n", row(8), row(8), row(8)));
        machine.put("meminfo", &format!("MemTotal: {} kB\nMemAvailable: {} kB\n", draw(), draw()));
        machine.put("net/dev", &format!("eth0: {}\n", row(16)));
        machine.put("diskstats", &format!("8 0 sda {}\n", row(11)));
        machine.sample();
        let report = machine.report();
        if report.one_minute.is_none() {
            continue;
        }
        for window in windows(&report) {
            let shares = [window.cpu_usage, window.memory_usage, window.disk_used, window.disk_inodes_used];
            for share in shares.iter().chain(&window.cpu_core_usage) {
                assert!((0.0..=100.0).contains(share), "{window:?}");
            }
            let sums = [window.network_bytes_sent, window.network_bytes_received, window.disk_bytes_read];
            assert!(sums.iter().chain([&window.disk_bytes_written]).all(|sum| 0.0 <= *sum && sum.is_finite()));
        }
    }
}

/// A report may take 2 KiB; what is measured is most of it.
#[test]
fn windows_of_a_usual_machine_are_small() {
    use prost::Message as _;
    let mut machine = Machine::new();
    for n in 0..100_u64 {
        machine.work(10 * n);
        let core = |core: u64| format!("cpu{core} {} 0 0 {} 0 0 0 0\n", n * core, 1000 * n);
        let cores: String = (0..16).map(core).collect();
        machine.put("stat", &format!("cpu  {} 0 0 {} 0 0 0 0\n{cores}", 120 * n, 16_000 * n));
        machine.sample();
    }
    let report = machine.report();
    assert_eq!(windows(&report)[0].cpu_core_usage.len(), 16);
    assert!(report.encoded_len() < 700, "{}", report.encoded_len());
}

#[test]
fn sampling_reuses_its_buffers() {
    let mut machine = Machine::new();
    machine.work(10);
    for _ in 0..2 * N_SAMPLES {
        machine.sample();
    }
    let before = (machine.samples.ring.as_ptr(), machine.samples.cores.as_ptr(), machine.reader.buffer.as_ptr());
    let cores = machine.reader.cores.as_ptr();
    for _ in 0..2 * N_SAMPLES {
        machine.sample();
    }
    let after = (machine.samples.ring.as_ptr(), machine.samples.cores.as_ptr(), machine.reader.buffer.as_ptr());
    assert_eq!(before, after);
    assert_eq!(cores, machine.reader.cores.as_ptr());
    assert_eq!(machine.samples.ring.capacity(), N_SAMPLES);
}

#[test]
fn this_machine_can_be_sampled() {
    let mut reader = Reader::default();
    reader.read(&Host::machine(), Timestamp::EPOCH);
    assert!(
        reader.sample.cpu_busy.is_some() && reader.sample.memory_used.is_some() && reader.sample.disk_used.is_some()
    );
    assert!(!reader.cores.is_empty());
}
