//! Texts of the kernel, read as bytes: no allocation, and no trust in their form.

use super::{CoreTicks, MAX_CORES, share};

/// Sectors are of this size in `diskstats`, whatever those of the disk are.
const SECTOR: u64 = 512;

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| *byte == b'\n')
}

fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty())
}

fn number(word: &[u8]) -> Option<u64> {
    std::str::from_utf8(word).ok()?.parse().ok()
}

/// Busy and total ticks of all processors; those of each go to `cores`.
pub(super) fn cpu(text: &[u8], cores: &mut Vec<CoreTicks>) -> Option<(u64, u64)> {
    let mut all = None;
    for line in lines(text) {
        let Some(rest) = line.strip_prefix(b"cpu") else { break };
        let mut fields = words(rest);
        if rest.first() == Some(&b' ') {
            all = ticks(fields);
        } else if cores.len() < MAX_CORES {
            fields.next(); // its number
            if let Some((busy, total)) = ticks(fields) {
                cores.push(CoreTicks { busy: wrapped(busy), total: wrapped(total) });
            }
        }
    }
    all
}

/// user nice system idle iowait irq softirq steal; guests are counted in user and nice already.
fn ticks<'a>(fields: impl Iterator<Item = &'a [u8]>) -> Option<(u64, u64)> {
    let (mut busy, mut total, mut n_fields) = (0_u64, 0_u64, 0);
    for (n, field) in fields.take(8).enumerate() {
        let field = number(field)?;
        total = total.wrapping_add(field);
        if n != 3 && n != 4 {
            busy = busy.wrapping_add(field);
        }
        n_fields += 1;
    }
    (4 <= n_fields).then_some((busy, total))
}

#[allow(clippy::cast_possible_truncation, reason = "differences of wrapped counters are those of the counters")]
fn wrapped(ticks: u64) -> u32 {
    ticks as u32
}

/// The share of memory that is not available, in per cent.
pub(super) fn memory(text: &[u8]) -> Option<f64> {
    let of = |name: &[u8]| lines(text).find_map(|line| words(line.strip_prefix(name)?).next().and_then(number));
    let (total, available) = (of(b"MemTotal:")?, of(b"MemAvailable:")?);
    share(total.saturating_sub(available), total)
}

/// Bytes received and sent, over all interfaces but the loopback.
pub(super) fn network(text: &[u8]) -> Option<(u64, u64)> {
    let mut sums = None;
    for line in lines(text) {
        let Some(colon) = line.iter().rposition(|byte| *byte == b':') else { continue };
        let (name, counters) = (line[..colon].trim_ascii(), &line[colon + 1..]);
        let mut fields = words(counters);
        let (Some(received), Some(sent)) = (fields.next().and_then(number), fields.nth(7).and_then(number)) else {
            continue;
        };
        let (all_received, all_sent) = sums.unwrap_or((0_u64, 0_u64));
        sums = Some(if name == b"lo" {
            (all_received, all_sent)
        } else {
            (all_received.wrapping_add(received), all_sent.wrapping_add(sent))
        });
    }
    sums
}

/// Bytes read and written, over whole devices: a partition's are its disk's too, and so are those of what is stacked on
/// a disk.
pub(super) fn disks(text: &[u8]) -> Option<(u64, u64)> {
    let mut sums = None;
    let mut disk: &[u8] = b"";
    for line in lines(text) {
        let mut fields = words(line).skip(2);
        let Some(name) = fields.next() else { continue };
        let (Some(read), Some(written)) = (fields.nth(2).and_then(number), fields.nth(3).and_then(number)) else {
            continue;
        };
        let stacked = [&b"loop"[..], b"ram", b"zram", b"dm-", b"md", b"sr", b"fd"];
        if stacked.iter().any(|kind| name.starts_with(kind)) || is_partition(disk, name) {
            sums = sums.or(Some((0, 0)));
            continue;
        }
        disk = name;
        let (all_read, all_written) = sums.unwrap_or((0_u64, 0_u64));
        let bytes = |sectors: u64| sectors.wrapping_mul(SECTOR);
        sums = Some((all_read.wrapping_add(bytes(read)), all_written.wrapping_add(bytes(written))));
    }
    sums
}

/// `sda1` of `sda`, `nvme0n1p1` of `nvme0n1`: the kernel lists partitions after their disk.
fn is_partition(disk: &[u8], name: &[u8]) -> bool {
    let Some(rest) = name.strip_prefix(disk).filter(|_| !disk.is_empty()) else { return false };
    let digits = if disk.last().is_some_and(u8::is_ascii_digit) { rest.strip_prefix(b"p") } else { Some(rest) };
    digits.is_some_and(|digits| !digits.is_empty() && digits.iter().all(u8::is_ascii_digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_read_without_counting_guests_twice() {
        let mut cores = Vec::new();
        let text = b"cpu  100 10 50 800 40 5 5 10 60 0\ncpu0 60 0 20 400 10 1 1 8 60 0\ncpu1 40 10 30 400 30 4 4 2 0 0\nintr 9 9\ncpu9 1 1 1 1\n";
        assert_eq!(cpu(text, &mut cores), Some((180, 1020)));
        assert_eq!(cores, [CoreTicks { busy: 90, total: 500 }, CoreTicks { busy: 90, total: 520 }]);
    }

    #[test]
    fn many_processors_are_cut_and_old_kernels_are_read() {
        let mut cores = Vec::new();
        let text: String =
            "cpu 1 2 3 4\n".to_owned() + &(0..300).map(|n| format!("cpu{n} 1 2 3 4\n")).collect::<String>();
        assert_eq!(cpu(text.as_bytes(), &mut cores), Some((6, 10)));
        assert_eq!(cores.len(), MAX_CORES);
        for broken in ["", "cpu", "cpu  1 2", "cpu  a b c d", "intr 1"] {
            assert_eq!(cpu(broken.as_bytes(), &mut Vec::new()), None, "{broken}");
        }
    }

    #[test]
    fn memory_is_what_is_not_available() {
        let text = b"MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    250 kB\n";
        assert_eq!(memory(text), Some(75.0));
        assert_eq!(memory(b"MemTotal: 1000 kB\n"), None);
        assert_eq!(memory(b"MemTotal: 0 kB\nMemAvailable: 0 kB\n"), None);
        assert_eq!(memory(b"MemTotal: 10 kB\nMemAvailable: 20 kB\n"), Some(0.0));
    }

    #[test]
    fn network_leaves_out_the_loopback_and_bears_names_with_colons() {
        let text = b"Inter-|   Receive      |  Transmit\n face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n\
            \x20   lo: 999 1 0 0 0 0 0 0 999 1 0 0 0 0 0 0\n  eth0:1000 2 0 0 0 0 0 0 2000 3 0 0 0 0 0 0\n eth0:1: 5 2 0 0 0 0 0 0 7 3 0 0 0 0 0 0\n";
        assert_eq!(network(text), Some((1005, 2007)));
        assert_eq!(network(b"    lo: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n"), Some((0, 0)));
        assert_eq!(network(b"Inter-|\n face |bytes\n"), None);
    }

    #[test]
    fn disks_count_whole_devices_once() {
        let text = b"   7  0 loop0 9 9 9 9 9 9 9 9 9 9 9\n 259  0 nvme0n1 10 0 100 0 5 0 50 0 0 0 0\n 259  1 nvme0n1p1 9 0 90 0 5 0 50 0 0 0 0\n\
            \x20 8  0 sda 1 0 4 0 1 0 6 0 0 0 0\n   8  1 sda1 1 0 4 0 1 0 6 0 0 0 0\n   8 16 sdb 1 0 1 0 1 0 1 0 0 0 0\n 253  0 dm-0 9 0 90 0 9 0 90 0\n";
        assert_eq!(disks(text), Some((105 * 512, 57 * 512)));
        assert_eq!(disks(b" 7 0 loop0 1 1 1 1 1 1 1 1\n"), Some((0, 0)));
        assert_eq!(disks(b""), None);
    }
}
