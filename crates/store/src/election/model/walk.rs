//! The walk through all states of the model's worlds, and what must hold in each.

use std::collections::{HashMap, VecDeque, hash_map::Entry};

use super::{
    Case, Flaw, World,
    steps::{Label, steps},
    timing,
};

/// Goes on without faults, one step after the other, until `done`. `None`: not within a minute, or with no end of steps
/// within one second.
pub(super) fn settle(case: &Case, world: World, done: impl Fn(&World) -> bool) -> Option<World> {
    let case = &Case { seconds: u64::MAX, ..*case };
    let mut world = World { faults: 0, deaths: 0, puts: u8::MAX, ..world };
    let until = world.now + 60;
    let mut n_steps = 0;
    while !done(&world) {
        // Whoever is down comes back, and whoever can do something does, before time goes on.
        let print = world.fingerprint(case);
        let mut next: Vec<World> = steps(case, &world)
            .into_iter()
            .filter(|(label, _)| !matches!(label.0, "a second passes" | "renews" | "releases"))
            .map(|(_, next)| World { puts: u8::MAX, ..next }.judged(case))
            .collect();
        if !next.is_empty() {
            // Each in turn, lest one of them starve the others.
            let at = n_steps % next.len();
            next.rotate_left(at);
        }
        match next.into_iter().find(|next| next.fingerprint(case) != print) {
            Some(next) => {
                world = next;
                n_steps += 1;
            }
            None => {
                world = World { now: world.now + 1, ..world }.judged(case);
                n_steps = 0;
            }
        }
        if until < world.now || 100 < n_steps || world.broken.is_some() {
            return None;
        }
    }
    (world.puts, world.faults, world.deaths) = (case.puts, case.faults, case.deaths);
    Some(world)
}

/// Walks through all states. Answers how many there are, or the story of the first that is broken.
fn explore(case: &Case) -> Result<usize, String> {
    let more: u8 = std::env::var("NSTANCE_MODEL").ok().and_then(|it| it.parse().ok()).unwrap_or(0);
    let case = &Case {
        seconds: case.seconds + u64::from(more),
        puts: case.puts + more,
        faults: case.faults + more,
        deaths: case.deaths + more,
        ..*case
    };
    let first = World::new(case).judged(case);
    let root = first.fingerprint(case);
    let mut seen: HashMap<u64, (u64, Label)> = HashMap::from([(root, (root, ("the beginning", 9)))]);
    let mut queue = VecDeque::from([(root, first)]);
    while let Some((from, world)) = queue.pop_front() {
        for (label, world) in steps(case, &world) {
            let world = world.judged(case);
            let print = world.fingerprint(case);
            let Entry::Vacant(vacant) = seen.entry(print) else { continue };
            vacant.insert((from, label));
            if let Some(why) = world.broken {
                return Err(story(&seen, print, why));
            }
            // From one state in a thousand, by chance: that it does not end in waiting or in turning in circles.
            if case.flaw.is_none() && print.is_multiple_of(1009) {
                let leads = |world: &World| world.leader(case).is_some();
                if settle(case, world.clone(), leads).is_none() {
                    return Err(story(&seen, print, "nobody comes to lead from here"));
                }
            }
            queue.push_back((print, world));
        }
    }
    Ok(seen.len())
}

fn story(seen: &HashMap<u64, (u64, Label)>, mut at: u64, why: &str) -> String {
    let mut lines = vec![why.to_owned()];
    while let Some((from, (what, seat))) = seen.get(&at) {
        lines.push(if *seat == 9 { (*what).to_owned() } else { format!("server {seat} {what}") });
        if *from == at {
            break;
        }
        at = *from;
    }
    lines.reverse();
    lines.join("\n  ")
}

/// The parts of the world that are walked through, each with its own bounds.
fn cases() -> [(&'static str, Case); 11] {
    let plain = Case::new(timing(2, 1));
    [
        ("two first candidates", Case { held: false, seconds: 3, ..plain }),
        ("store", Case { faults: 2, ..plain }),
        ("death", Case { deaths: 1, seconds: 3, ..plain }),
        ("lengths", Case { other: Some(timing(4, 1)), ..plain }),
        ("lengths with a fault", Case { other: Some(timing(4, 1)), faults: 1, seconds: 3, ..plain }),
        ("peers", Case { peers: true, deaths: 1, puts: 1, seconds: 1, ..plain }),
        ("listener", Case { peers: true, faults: 1, only_listeners: true, seconds: 1, ..plain }),
        ("links", Case { peers: true, faults: 1, puts: 1, seconds: 1, ..plain }),
        ("hand-over", Case { releases: true, seconds: 3, ..plain }),
        ("hand-over by word", Case { releases: true, peers: true, seconds: 1, ..plain }),
        ("skew", Case { timing: timing(3, 1), slow: true, seconds: 6, ..plain }),
    ]
}

#[test]
fn no_interleaving_of_two_candidates_opens_two_guards() {
    for (name, case) in cases() {
        match explore(&case) {
            Ok(n) => println!("{name}: {n} states"),
            Err(story) => panic!("{name}:\n  {story}"),
        }
    }
}

#[test]
fn each_broken_rule_is_found_out() {
    let plain = Case::new(timing(2, 1));
    let peers = Case { peers: true, puts: 1, seconds: 1, ..plain };
    let shortens = Case { timing: timing(5, 1), other: Some(timing(2, 1)), ..plain };
    let lengthens = Case { other: Some(timing(5, 1)), ..plain };
    for (flaw, case) in [
        (Flaw::CountsFromTheAnswer, plain),
        (Flaw::ActsOnHope, Case { faults: 1, ..plain }),
        (Flaw::CutsTooLate, shortens),
        (Flaw::ForgetsWhatIsUnderWay, Case { faults: 1, ..shortens }),
        (Flaw::ExtendsTooEarly, lengthens),
        (Flaw::ObeysItsOwnTtl, lengthens),
        (Flaw::CountsFromBeforeTheRead, plain),
        (Flaw::TakesSilenceForDeath, Case { faults: 1, ..peers }),
        (Flaw::ActsWithoutAListener, Case { faults: 1, ..peers }),
        (Flaw::KeepsAStaleProof, Case { faults: 1, only_listeners: true, puts: 2, seconds: 2, ..peers }),
        (Flaw::ReleasesBeforeItCloses, Case { releases: true, ..plain }),
    ] {
        let case = Case { flaw: Some(flaw), ..case };
        let story = explore(&case).expect_err(&format!("{flaw:?} goes unnoticed"));
        println!("{flaw:?}:\n  {story}");
    }
}

#[test]
fn a_margin_covers_a_slow_clock_and_its_absence_does_not() {
    let slow = Case { slow: true, seconds: 6, ..Case::new(timing(3, 1)) };
    explore(&slow).unwrap_or_else(|story| panic!("{story}"));
    let story = explore(&Case { timing: timing(3, 0), ..slow }).expect_err("no margin");
    println!("{story}");
}

/// The swap's own condition is the second look: leaving the other out costs a refused put, not safety.
#[test]
fn a_bid_without_a_second_look_is_safe() {
    let case = Case { flaw: Some(Flaw::LooksOnce), ..Case::new(timing(2, 1)) };
    explore(&case).unwrap_or_else(|story| panic!("{story}"));
}
