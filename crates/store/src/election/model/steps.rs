//! What may happen next in a world of the model.

use std::{
    hash::{DefaultHasher, Hasher},
    rc::Rc,
    time::Duration,
};

use nstance_core::{
    ids::Epoch,
    ports::{
        objects::{Condition, ETag},
        peers::{Knock, PeerView},
    },
    term::Moment,
    time::{Mono, Timestamp},
};

use super::{
    super::{
        LeaseRecord, Observation, TakeOver, Timing,
        follow::{Follower, KNOCKS, Wish},
        hold::{Answer, Candidacy, Sight, Step, Tenure, Turn},
        next_epoch,
    },
    Case, Flaw, Knocking, Life, S, Server, Wait, World, identity, sight,
};

/// A step's name and the server that takes it, for the story of a violation.
pub(super) type Label = (&'static str, usize);

/// Takes a step by its name and what it changes.
type Steps<'a> = &'a mut dyn FnMut(&'static str, &dyn Fn(&mut World));

/// Every state that may come next.
pub(super) fn steps(case: &Case, world: &World) -> Vec<(Label, World)> {
    let mut next = Vec::new();
    if world.now < case.seconds {
        next.push((("a second passes", 9), World { now: world.now + 1, ..world.clone() }));
    }
    for at in 0..world.flying.len() {
        next.push((("a put arrives", world.flying[at].seat), world.clone().arrive(at)));
    }
    for seat in 0..world.servers.len() {
        if world.servers[seat].up {
            live_steps(case, world, seat, &mut next);
        } else {
            for elsewhere in [false, true] {
                let mut world = world.clone();
                let server = world.server(seat);
                let n_lives = server.n_lives + 1;
                *server = Server { n_lives, ..Server::new(identity(seat, n_lives, elsewhere)) };
                next.push(((if elsewhere { "restarts elsewhere" } else { "restarts" }, seat), world));
            }
        }
    }
    next
}

fn live_steps(case: &Case, world: &World, seat: usize, next: &mut Vec<(Label, World)>) {
    let server = &world.servers[seat];
    let now = world.local(case, seat);
    let mut to = |name, change: &dyn Fn(&mut World)| {
        let mut world = world.clone();
        change(&mut world);
        next.push(((name, seat), world));
    };
    if 0 < world.deaths {
        to("dies", &|world| {
            world.deaths -= 1;
            world.server(seat).up = false;
        });
    }
    let may_fail = 0 < world.faults && !case.only_listeners;
    let may_put = 0 < world.puts;
    if case.peers && server.listening && 0 < world.faults {
        to("loses its listener", &|world| {
            world.faults -= 1;
            let server = world.server(seat);
            server.listening = false;
            // The guard is closed before anything else, and that ends the term.
            if matches!(server.life, Life::Hold { .. }) && !case.has(Flaw::ActsWithoutAListener) {
                server.follower = Follower::new(server.own.clone(), None);
                server.follows();
            }
        });
    }
    if !server.listening {
        to("listens again", &|world| world.server(seat).listening = true);
    }
    match &server.life {
        Life::Follow { reading } => {
            match reading {
                None => match wish(case, server, now) {
                    // The sample is taken at once. Taken later, it could only be newer, and what is newer is later to
                    // run out; how late its answer comes is open.
                    Wish::Look => {
                        to("reads", &|world| {
                            let sample = world.store.clone();
                            world.server(seat).life = Life::Follow { reading: Some((now, sample)) };
                        });
                        if may_fail {
                            to("cannot read", &|world| {
                                world.faults -= 1;
                                world.server(seat).follower.look_failed(now + S(1));
                            });
                        }
                    }
                    Wish::Bid { seen, .. } if server.listening && may_put => {
                        to("bids", &|world| bid(case, world, seat, &seen));
                    }
                    Wish::Bid { .. } | Wish::Wait { .. } => {}
                },
                Some((began, sample)) => to("has looked", &|world| {
                    let server = world.server(seat);
                    let ended = if case.has(Flaw::CountsFromBeforeTheRead) { began.minus(S(2)) } else { now };
                    server.follower.looked(sample.as_deref().cloned(), *began, ended);
                    server.life = Life::Follow { reading: None };
                }),
            }
            if case.peers {
                peer_steps(case, world, seat, now, &mut to);
            }
        }
        Life::Bid { candidacy, record, wait } | Life::Release { candidacy, record, wait, .. } => {
            if *wait == Wait::Send && may_put {
                to("puts the same again", &|world| {
                    world.puts -= 1;
                    world.send(seat, candidacy.put().clone(), record.clone(), candidacy.condition().clone());
                });
            }
            answers(case, world, seat, wait, &mut to, &|world, said| {
                let server = world.server(seat);
                let (Life::Bid { candidacy, .. } | Life::Release { candidacy, .. }) = &mut server.life else { return };
                let turn = match said {
                    Said::Answer(Answer::Unclear) if case.has(Flaw::ActsOnHope) => Turn::Won(ETag("hoped".into())),
                    Said::Answer(answer) => candidacy.answered(&answer, now),
                    Said::Sight(sight) => candidacy.saw(&sight, now),
                };
                turned(server, turn, now);
            });
        }
        Life::Hold { tenure, record, end, wait } => {
            if *wait == Wait::Idle && may_put {
                for timing in [Some(case.timing), case.other].into_iter().flatten() {
                    // Renewing twice within one second tells nothing new.
                    if tenure.landed().start.mono < now || timing != tenure.landed().timing {
                        to("renews", &|world| renew(case, world, seat, timing, now));
                    }
                }
            }
            if case.releases && *wait == Wait::Idle && may_put {
                to("releases", &|world| {
                    world.puts -= 1;
                    let server = world.server(seat);
                    let put = server.put(now, tenure.landed().timing, tenure.landed().epoch);
                    let record = LeaseRecord { released: true, ..record.clone() };
                    let condition = Condition::Match(tenure.etag().clone());
                    server.life = Life::Release {
                        candidacy: Candidacy::new(put.clone(), condition.clone()),
                        record: record.clone(),
                        wait: Wait::Send,
                        still_open: case.has(Flaw::ReleasesBeforeItCloses).then_some(*end),
                    };
                    world.send(seat, put, record, condition);
                });
            }
            answers(case, world, seat, wait, &mut to, &|world, said| {
                let server = world.server(seat);
                let Life::Hold { tenure, wait, .. } = &mut server.life else { return };
                let Wait::Answer { put, .. } = wait.clone() else {
                    let Said::Sight(sight) = said else { return };
                    let was_there = matches!(&sight, Sight::Version { etag, .. } if etag == tenure.etag());
                    let step = tenure.saw(sight);
                    *wait = Wait::Idle;
                    if was_there && case.has(Flaw::ForgetsWhatIsUnderWay) {
                        *tenure = Tenure::new(tenure.landed().clone(), tenure.etag().clone());
                    }
                    held(case, server, step, now);
                    return;
                };
                let Said::Answer(answer) = said else { return };
                let step = tenure.answered(&put, answer);
                *wait = if step == Step::ReadBack { Wait::Read } else { Wait::Idle };
                held(case, server, step, now);
            });
        }
    }
}

fn wish(case: &Case, server: &Server, now: Mono) -> Wish {
    let wish = server.follower.wish(now);
    let Some(seen) = server.follower.seen() else { return wish };
    let Some(lease) = seen.lease.as_ref().filter(|_| !matches!(wish, Wish::Bid { .. })) else { return wish };
    let is_over = |ttl: Duration, at: Mono| seen.first_seen + ttl <= at;
    let bids = match case.flaw {
        Some(Flaw::ObeysItsOwnTtl) => is_over(case.timing.ttl, now),
        Some(Flaw::LooksOnce) => is_over(lease.value.ttl, now),
        _ => false,
    };
    if bids { Wish::Bid { seen: seen.clone(), reason: TakeOver::Expired } } else { wish }
}

enum Said {
    Answer(Answer),
    Sight(Sight),
}

/// All that may be said to whoever waits for the store.
fn answers(case: &Case, world: &World, seat: usize, wait: &Wait, to: Steps<'_>, say: &dyn Fn(&mut World, Said)) {
    let may_fail = 0 < world.faults && !case.only_listeners;
    match wait {
        Wait::Idle | Wait::Send => {}
        Wait::Answer { put, answer } => {
            if let Some(answer) = answer {
                to("is answered", &|world| say(world, Said::Answer(answer.clone())));
                if may_fail && matches!(answer, Answer::Landed(_)) {
                    to("is refused though it landed", &|world| {
                        world.faults -= 1;
                        say(world, Said::Answer(Answer::Refused));
                    });
                }
            } else if may_fail {
                to("is told that nothing was done", &|world| {
                    world.faults -= 1;
                    world.flying.retain(|it| it.seat != seat || it.body.meta.write_id != put.write_id);
                    say(world, Said::Answer(Answer::NotDone));
                });
            }
            if may_fail && *answer != Some(Answer::Refused) {
                // The put may be under way still, and land later.
                to("waits in vain", &|world| {
                    world.faults -= 1;
                    say(world, Said::Answer(Answer::Unclear));
                });
            }
        }
        Wait::Read => {
            to("reads back", &|world| {
                let there = sight(&world.store);
                say(world, Said::Sight(there));
            });
            if may_fail {
                to("cannot read back", &|world| {
                    world.faults -= 1;
                    say(world, Said::Sight(Sight::Failed));
                });
            }
        }
    }
}

fn bid(case: &Case, world: &mut World, seat: usize, seen: &Observation) {
    world.puts -= 1;
    let now = world.local(case, seat);
    let server = world.server(seat);
    let put = server.put(now, case.timing, next_epoch(seen.epoch(), Epoch(0), Epoch(0)));
    let record = LeaseRecord {
        epoch: put.epoch,
        holder: server.own.server_id.clone(),
        process: server.own.process.clone(),
        addr: server.own.addr.clone(),
        health_addr: String::new(),
        direct: true,
        boot_id: server.own.boot_id.clone(),
        provider_id: None,
        ttl: put.timing.ttl,
        acquired_at: Timestamp::EPOCH,
        renewed_at: Timestamp::EPOCH,
        released: false,
        previous: None,
    };
    let condition = seen.lease.as_ref().map_or(Condition::Create, |it| Condition::Match(it.etag.clone()));
    let candidacy = Candidacy::new(put.clone(), condition.clone());
    server.life = Life::Bid { candidacy, record: record.clone(), wait: Wait::Send };
    (server.hearing, server.knocking) = (None, None);
    world.send(seat, put, record, condition);
}

fn renew(case: &Case, world: &mut World, seat: usize, timing: Timing, now: Mono) {
    world.puts -= 1;
    let server = world.server(seat);
    let fresh = server.put(now, timing, Epoch(0)).write_id;
    let Life::Hold { tenure, record, end, .. } = &mut server.life else { return };
    let put = tenure.next(timing, Moment { wall: Timestamp::EPOCH, mono: now }, || fresh);
    match case.flaw {
        Some(Flaw::CutsTooLate | Flaw::CountsFromTheAnswer) => {}
        Some(Flaw::ExtendsTooEarly) => *end = put.end().max(*end),
        _ => *end = tenure.end(),
    }
    let record = LeaseRecord { epoch: put.epoch, ttl: put.timing.ttl, ..record.clone() };
    let condition = Condition::Match(tenure.etag().clone());
    world.send(seat, put, record, condition);
}

/// What a candidate, or one that gives up, makes of its machine's word.
fn turned(server: &mut Server, turn: Turn, now: Mono) {
    let is_release = matches!(server.life, Life::Release { .. });
    let (Life::Bid { candidacy, record, wait } | Life::Release { candidacy, record, wait, .. }) = &mut server.life
    else {
        return;
    };
    match turn {
        Turn::ReadBack => *wait = Wait::Read,
        Turn::PutAgain => *wait = Wait::Send,
        Turn::Won(etag) if is_release => {
            server.released = Some((etag, record.epoch));
            server.follower = Follower::new(server.own.clone(), None).gave_up(now);
            server.follows();
        }
        Turn::Won(etag) => {
            let put = candidacy.put().clone();
            let (end, record) = (put.end(), record.clone());
            server.life = Life::Hold { tenure: Tenure::new(put, etag), record, end, wait: Wait::Idle };
            server.released = None;
        }
        Turn::Lost | Turn::TooLate | Turn::Failed => {
            if is_release {
                server.follower = Follower::new(server.own.clone(), None).gave_up(now);
            } else {
                server.follower.bid_failed(now);
            }
            server.follows();
        }
    }
}

/// What a holder makes of its machine's word.
fn held(case: &Case, server: &mut Server, step: Step, now: Mono) {
    let Life::Hold { tenure, record, end, .. } = &mut server.life else { return };
    match step {
        Step::Landed => {
            *end =
                if case.has(Flaw::CountsFromTheAnswer) { now + tenure.landed().timing.act_for() } else { tenure.end() };
            record.ttl = tenure.landed().timing.ttl;
        }
        Step::Lost => {
            server.follower = Follower::new(server.own.clone(), None);
            server.follows();
        }
        Step::Again | Step::ReadBack => match case.flaw {
            Some(Flaw::CutsTooLate | Flaw::CountsFromTheAnswer | Flaw::ExtendsTooEarly) => {}
            _ => *end = tenure.end(),
        },
    }
}

/// The link to the holder: questions, breaks and knocks.
fn peer_steps(case: &Case, world: &World, seat: usize, now: Mono, to: Steps<'_>) {
    let server = &world.servers[seat];
    if let Some(view) = &server.hearing {
        to("hears", &|world| {
            let server = world.server(seat);
            server.hearing = None;
            server.follower.heard(view, now);
        });
    } else if let Some(holder) = server.follower.holder() {
        let there = world.listens(&holder.addr);
        if let Some(there) = there {
            let at = world.servers.iter().position(|it| Rc::ptr_eq(it, there)).unwrap_or_default();
            let view = there.view(world.local(case, at));
            // A question is answered when there is news, or after a while: then only if it makes a difference.
            if holder.known != Some((view.role, view.etag.clone())) || makes_a_difference(server, &view, now) {
                to("is told by its peer", &|world| world.server(seat).hearing = Some(Rc::new(view.clone())));
            }
        }
        if there.is_none() || (0 < world.faults && !case.only_listeners) {
            to("finds the link broken", &|world| {
                let refused = world.listens(&holder.addr).is_none();
                world.faults -= u8::from(!refused);
                let server = world.server(seat);
                if server.follower.link_broke(now) {
                    let (process, addr) = (holder.process.clone(), holder.addr.clone());
                    server.knocking = Some(Knocking { process, addr, began: now, refused, ended: false });
                }
            });
        }
    }
    match &server.knocking {
        Some(knocking) if !knocking.ended => to("ends its knocking", &|world| {
            let refused = knocking.refused && world.listens(&knocking.addr).is_none();
            world.server(seat).knocking = Some(Knocking { refused, ended: true, ..knocking.clone() });
        }),
        Some(knocking) => to("takes note of the knocks", &|world| {
            let server = world.server(seat);
            server.knocking = None;
            let counts = knocking.refused || case.has(Flaw::TakesSilenceForDeath);
            let knocks = [if counts { Knock::Refused } else { Knock::Unknown }; KNOCKS.len() + 1];
            let mut began = knocking.began;
            if counts && case.has(Flaw::KeepsAStaleProof) {
                // As if they had begun now.
                server.follower.link_broke(now);
                began = now;
            }
            server.follower.knocked(&knocking.process, began, &knocks, now);
        }),
        None => {}
    }
}

fn makes_a_difference(server: &Server, view: &PeerView, now: Mono) -> bool {
    let print = |follower: &Follower| {
        let mut into = DefaultHasher::new();
        follower.fingerprint(now, &mut into);
        into.finish()
    };
    let mut follower = server.follower.clone();
    follower.heard(view, now);
    print(&follower) != print(&server.follower)
}
