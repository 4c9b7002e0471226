//! The mass-disconnect brake: when many agents vanish at once while their VMs run, it is the network or us, not them.
//!
//! A function of who is *still* lost, so that nothing latches: it ends as agents return or are replaced. Remembered is
//! whom it let go, at most one each minute, longest lost first; and for a moment after its end who belonged to the
//! wave. When a network heals, agents come back one by one, and the last third of them must not be replaced because the
//! first two thirds were faster.

use std::{collections::BTreeSet, time::Duration};

use nstance_core::{
    ids::{GroupRef, InstanceId},
    instance::{Health, Seen},
    snapshot::Brake,
    time::Timestamp,
};

use super::{Entry, RETURN_GRACE, State};

/// How often one of the held may be replaced after all.
const RELEASE: Duration = Duration::from_secs(60);

/// When more than so many are lost, not every pass of every group counts them anew: ten thousand agents that vanish
/// together wake all groups again and again, and whoever counted each time would do nothing else.
const MANY: usize = 100;

/// For so long a count of many stands, for all who were in it.
const STANDS: Duration = Duration::from_millis(50);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BrakeSettings {
    pub min: u32,
    pub percent: u32,
    pub window: Duration,
}

#[derive(Default)]
pub struct BrakeMemory {
    wave: BTreeSet<InstanceId>,
    released: BTreeSet<InstanceId>,
    last_release: Option<Timestamp>,
    since: Option<Timestamp>,
    /// The losses that are left would not have begun it.
    ended_at: Option<Timestamp>,
    counted: Counted,
}

/// The last count.
#[derive(Default)]
struct Counted {
    at: Option<Timestamp>,
    lost: BTreeSet<InstanceId>,
    /// Somebody was silent on a stream that looked open.
    muted: bool,
    /// A pass took it over though there may be more by now; when to look again.
    again_at: Option<Timestamp>,
}

impl Counted {
    fn stands_until(&self, now: Timestamp) -> Option<Timestamp> {
        let at = self.at.filter(|_| MANY < self.lost.len())?;
        (at <= now && now < at.plus(STANDS)).then(|| at.plus(STANDS))
    }
}

impl BrakeMemory {
    /// When the next one may go.
    fn next_release(&self) -> Option<Timestamp> {
        Some(self.last_release.max(self.since)?.plus(RELEASE))
    }

    /// The next moment at which time alone changes who is held.
    pub fn next_change(&self) -> Option<Timestamp> {
        let change = self.ended_at.map(|at| at.plus(RETURN_GRACE)).or(self.next_release());
        [change, self.counted.again_at].into_iter().flatten().min()
    }
}

/// Who is held, and since when. `lost` is in the order of time; `n_connected` counts those who are connected now.
fn held(
    lost: &[(Timestamp, InstanceId)],
    n_connected: usize,
    settings: BrakeSettings,
) -> Option<(Timestamp, BTreeSet<InstanceId>)> {
    let mut held = BTreeSet::new();
    let mut since = None;
    let (mut end, mut taken) = (0, 0);
    for (begin, (at, _)) in lost.iter().enumerate() {
        while lost.get(end).is_some_and(|(later, _)| later.since(*at) <= settings.window) {
            end += 1;
        }
        // Whoever is lost since then was connected then.
        let connected = n_connected + lost.len() - begin;
        let share = connected * usize::try_from(settings.percent).unwrap_or(100) / 100;
        let limit = share.max(usize::try_from(settings.min).unwrap_or(usize::MAX));
        if limit < end - begin {
            // Windows overlap; whoever is before `taken` is in already.
            held.extend(lost[taken.max(begin)..end].iter().map(|(_, id)| *id));
            taken = end;
            let passed = lost[begin + limit].0;
            since = Some(since.map_or(passed, |since: Timestamp| since.min(passed)));
        }
    }
    Some((since?, held))
}

impl State {
    /// Whether one in these groups is silent, on a stream that still looks open or without one, and was not counted.
    fn has_uncounted(&self, concerned: &[GroupRef], now: Timestamp) -> bool {
        let counted = &self.brake_memory.counted.lost;
        self.living_of(concerned).any(|id| !counted.contains(id) && self.is_silent(*id, now))
    }

    fn is_silent(&self, id: InstanceId, now: Timestamp) -> bool {
        self.entries.get(&id).is_some_and(|entry| matches!(entry.health(self, now), Health::Silent { .. }))
    }

    fn living_of<'a>(&'a self, groups: &'a [GroupRef]) -> impl Iterator<Item = &'a InstanceId> {
        groups.iter().filter_map(|group| self.groups.get(group)).flat_map(|it| &it.living)
    }

    /// Agents whose report is overdue on a stream that still looks open: a network that swallows packets does not end it
    /// for a while. All of the shard's, looked for only when one in a group of `concerned` is silent by now, or some were
    /// at the last count: the first to be silent must not be judged before it is known how many will be.
    fn muted(&self, concerned: &[GroupRef], now: Timestamp) -> BTreeSet<InstanceId> {
        let is_mute =
            |entry: &Entry| entry.link.stream.is_some() && matches!(entry.health(self, now), Health::Silent { .. });
        let mut living = self.living_of(concerned).filter_map(|id| self.entries.get(id));
        if !self.brake_memory.counted.muted && !living.any(|entry| is_mute(entry)) {
            return BTreeSet::new();
        }
        let is_overdue = |entry: &Entry| entry.link.overdue_at().is_some_and(|at| at <= now);
        self.entries.iter().filter(|(_, entry)| is_overdue(entry)).map(|(id, _)| *id).collect()
    }

    /// The brake as it stands now, for these groups. Lets one more go when its minute has come.
    pub(super) fn brake(&mut self, concerned: &[GroupRef], now: Timestamp) -> Brake {
        match self.brake_memory.counted.stands_until(now) {
            // A verdict of a moment ago is what a pass of a moment ago would have acted on.
            Some(until) if !self.has_uncounted(concerned, now) => self.brake_memory.counted.again_at = Some(until),
            _ => self.count_lost(concerned, now),
        }
        let memory = &self.brake_memory;
        if memory.wave.is_empty() {
            return Brake::default();
        }
        let held: BTreeSet<_> = self.living_of(concerned).filter(|id| memory.wave.contains(id)).copied().collect();
        let released = memory.released.intersection(&held).copied().collect();
        Brake { held, released, since: memory.since }
    }

    /// Counts who is lost, and from that who is held.
    fn count_lost(&mut self, concerned: &[GroupRef], now: Timestamp) {
        let muted = self.muted(concerned, now);
        let mut lost: Vec<(Timestamp, InstanceId)> = self
            .lost
            .union(&muted)
            .filter_map(|id| {
                let entry = self.entries.get(id).filter(|entry| entry.seen == Seen::Running)?;
                // Of these it began with their last word, of the others with the loss.
                if muted.contains(id) {
                    return Some((entry.link.last_seen, *id));
                }
                let is_lost = entry.link.stream.is_none()
                    && matches!(entry.health(self, now), Health::Lost { .. } | Health::Silent { .. });
                is_lost.then_some((entry.link.lost_at.or(self.agents_since)?, *id))
            })
            .collect();
        lost.sort_unstable();
        let now_held = held(&lost, self.n_connected.saturating_sub(muted.len()), self.brake_settings);
        let memory = &mut self.brake_memory;
        memory.counted = Counted {
            at: Some(now),
            lost: lost.iter().map(|(_, id)| *id).collect(),
            muted: !muted.is_empty(),
            again_at: None,
        };
        memory.judge(now_held, &lost, now);
    }
}

impl BrakeMemory {
    /// Takes in who is held by the last count, and lets one go if it is time.
    fn judge(
        &mut self,
        now_held: Option<(Timestamp, BTreeSet<InstanceId>)>,
        lost: &[(Timestamp, InstanceId)],
        now: Timestamp,
    ) {
        let began = now_held.is_some();
        if let Some((since, held)) = now_held {
            self.since.get_or_insert(since);
            self.ended_at = None;
            self.wave.extend(held);
        }
        self.wave.retain(|id| self.counted.lost.contains(id));
        if !began && (self.wave.is_empty() || RETURN_GRACE <= now.since(*self.ended_at.get_or_insert(now))) {
            *self = Self { counted: std::mem::take(&mut self.counted), ..Self::default() };
            return;
        }
        self.released.retain(|id| self.wave.contains(id));
        if self.next_release().is_some_and(|at| at <= now)
            && let Some((_, id)) = lost.iter().find(|(_, id)| self.wave.contains(id) && !self.released.contains(id))
        {
            self.released.insert(*id);
            self.last_release = Some(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use nstance_core::ids::uuid_v7;

    use super::*;

    const SETTINGS: BrakeSettings = BrakeSettings { min: 3, percent: 40, window: Duration::from_secs(10) };

    fn lost(times: &[i64]) -> Vec<(Timestamp, InstanceId)> {
        times
            .iter()
            .enumerate()
            .map(|(n, secs)| {
                let at = Timestamp::from_millis(secs * 1000);
                let [.., high, low] = n.to_be_bytes();
                let random = [0, 0, 0, 0, 0, 0, 0, 0, high, low];
                (at, InstanceId::new("knc".parse().unwrap(), uuid_v7(at, random)))
            })
            .collect()
    }

    fn n_held(times: &[i64], n_connected: usize) -> usize {
        held(&lost(times), n_connected, SETTINGS).map_or(0, |(_, held)| held.len())
    }

    #[test]
    fn a_few_losses_are_never_held() {
        assert_eq!(n_held(&[0, 0, 0], 0), 0, "three of three, but not more than three");
        assert_eq!(n_held(&[0, 0, 0, 0, 0], 995), 0, "five of a thousand");
    }

    #[test]
    fn a_wave_is_held_as_a_whole() {
        assert_eq!(n_held(&[0, 0, 0, 0], 0), 4);
        assert_eq!(n_held(&vec![5; 500], 500), 500);
        assert_eq!(n_held(&vec![5; 400], 600), 0, "exactly the share is not more than it");
        assert_eq!(n_held(&vec![5; 401], 599), 401);
    }

    #[test]
    fn losses_that_trickle_are_not_a_wave() {
        assert_eq!(n_held(&[0, 20, 40, 60, 80, 100], 4), 0);
        assert_eq!(n_held(&[0, 1, 2, 3, 60], 0), 4, "the late one is alone");
    }

    #[test]
    fn overlapping_windows_hold_each_once_and_none_twice() {
        // Two waves that share the losses at 8 and 9; the one at 30 is alone.
        assert_eq!(n_held(&[0, 1, 8, 9, 15, 16, 17, 30], 0), 7);
    }

    #[test]
    fn a_count_of_many_stands_for_a_moment_and_one_of_few_never() {
        let counted = |n: usize| Counted {
            at: Some(Timestamp::from_millis(1000)),
            lost: lost(&vec![1; n]).into_iter().map(|(_, id)| id).collect(),
            ..Counted::default()
        };
        let (at, until) = (Timestamp::from_millis, Some(Timestamp::from_millis(1050)));
        assert_eq!([999, 1000, 1049, 1050].map(|now| counted(101).stands_until(at(now))), [None, until, until, None]);
        assert_eq!(counted(100).stands_until(at(1000)), None, "so few are counted each time");
    }

    #[test]
    fn the_brake_began_when_the_limit_was_passed() {
        let (since, _) = held(&lost(&[0, 1, 2, 3, 4]), 0, SETTINGS).unwrap();
        assert_eq!(since, Timestamp::from_millis(3000));
    }
}
