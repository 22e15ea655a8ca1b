//! Turns a table of decisions into classic BPF.
//!
//! ```text
//!   architecture is ours? ── no ──▶ kill
//!   number ─▶ binary search over intervals of equal decision ─▶ return, or look at arguments
//! ```
//!
//! Numbers with equal decisions that follow each other share one interval, and the search halves what is left at each
//! comparison. Only the low half of an argument is looked at: every argument judged here is a 32-bit one for the kernel.

use std::collections::BTreeMap;

/// `struct sock_filter` of include/uapi/linux/filter.h.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Instruction {
    code: u16,
    if_true: u8,
    if_false: u8,
    value: u32,
}

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    /// The kernel does it.
    Allow,
    /// It returns this error number and does nothing.
    Refuse(u16),
    /// `argument & mask` decides: `then` if it is one of `values`, else `otherwise`.
    If {
        argument: u8,
        mask: u32,
        values: &'static [u32],
        then: &'static Decision,
        otherwise: &'static Decision,
    },
    /// `then` if `argument` has any of the bits of `mask`, else `otherwise`.
    IfAnyBit { argument: u8, mask: u32, then: &'static Decision, otherwise: &'static Decision },
}

// include/uapi/linux/bpf_common.h
const LOAD_WORD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP: u16 = 0x05;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_AT_LEAST: u16 = 0x35;
const JUMP_IF_ANY_BIT: u16 = 0x45;
const RETURN: u16 = 0x06;
// include/uapi/linux/seccomp.h
const KILL_PROCESS: u32 = 0x8000_0000;
const ERRNO: u32 = 0x0005_0000;
const ALLOW: u32 = 0x7fff_0000;
// `struct seccomp_data`: number, architecture, instruction pointer, six arguments.
const NUMBER_OFFSET: u32 = 0;
const ARCHITECTURE_OFFSET: u32 = 4;
const ARGUMENTS_OFFSET: u32 = 16;

// include/uapi/linux/audit.h
#[cfg(target_arch = "x86_64")]
const ARCHITECTURE: u32 = 0xC000_003E;
#[cfg(target_arch = "aarch64")]
const ARCHITECTURE: u32 = 0xC000_00B7;

const fn plain(code: u16, value: u32) -> Instruction {
    Instruction { code, if_true: 0, if_false: 0, value }
}

const fn branch(code: u16, value: u32, if_true: u8, if_false: u8) -> Instruction {
    Instruction { code, if_true, if_false, value }
}

/// Compiles `rules`; a number that has none answers `ENOSYS`.
pub(super) fn compile(rules: &BTreeMap<u32, Decision>) -> Vec<Instruction> {
    let mut program = vec![
        plain(LOAD_WORD, ARCHITECTURE_OFFSET),
        branch(JUMP_IF_EQUAL, ARCHITECTURE, 1, 0),
        plain(RETURN, KILL_PROCESS),
        plain(LOAD_WORD, NUMBER_OFFSET),
    ];
    program.extend(search(&intervals(rules)));
    program
}

/// Returns the first number of each interval of equal decisions, in order; the first is 0.
fn intervals(rules: &BTreeMap<u32, Decision>) -> Vec<(u32, Decision)> {
    let unknown = Decision::Refuse(enosys());
    let mut intervals = vec![(0, unknown)];
    let mut push = |start: u32, decision: Decision| match intervals.last_mut() {
        Some((_, last)) if *last == decision => {}
        Some((last_start, last)) if *last_start == start => *last = decision,
        _ => intervals.push((start, decision)),
    };
    let mut next = 0;
    for (number, decision) in rules {
        if *number > next {
            push(next, unknown);
        }
        push(*number, *decision);
        next = number.saturating_add(1);
    }
    push(next, unknown);
    intervals
}

fn enosys() -> u16 {
    u16::try_from(libc::ENOSYS).expect("error numbers are below 4096")
}

fn search(intervals: &[(u32, Decision)]) -> Vec<Instruction> {
    if let [(_, decision)] = intervals {
        return decide(decision);
    }
    let (low, high) = intervals.split_at(intervals.len() / 2);
    let (start, _) = high[0];
    let low = search(low);
    let mut code = match u8::try_from(low.len()) {
        Ok(length) => vec![branch(JUMP_IF_AT_LEAST, start, length, 0)],
        // Too far for a conditional jump.
        Err(_) => vec![
            branch(JUMP_IF_AT_LEAST, start, 0, 1),
            plain(JUMP, u32::try_from(low.len()).expect("a program has at most 4096 instructions")),
        ],
    };
    code.extend(low);
    code.extend(search(high));
    code
}

fn decide(decision: &Decision) -> Vec<Instruction> {
    match decision {
        Decision::Allow => vec![plain(RETURN, ALLOW)],
        Decision::Refuse(errno) => vec![plain(RETURN, ERRNO | u32::from(*errno))],
        Decision::If { argument, mask, values, then, otherwise } => {
            let otherwise = decide(otherwise);
            let mut code = vec![load(*argument), plain(AND, *mask)];
            for (index, value) in values.iter().enumerate() {
                let distance = values.len() - 1 - index + otherwise.len();
                code.push(branch(JUMP_IF_EQUAL, *value, short(distance), 0));
            }
            code.extend(otherwise);
            code.extend(decide(then));
            code
        }
        Decision::IfAnyBit { argument, mask, then, otherwise } => {
            let otherwise = decide(otherwise);
            let mut code = vec![load(*argument), branch(JUMP_IF_ANY_BIT, *mask, short(otherwise.len()), 0)];
            code.extend(otherwise);
            code.extend(decide(then));
            code
        }
    }
}

fn load(argument: u8) -> Instruction {
    plain(LOAD_WORD, ARGUMENTS_OFFSET + 8 * u32::from(argument))
}

fn short(distance: usize) -> u8 {
    u8::try_from(distance).expect("decisions are constants of a few dozen instructions")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::table;
    use super::*;

    /// What the kernel would do with the program, for one call.
    fn run(program: &[Instruction], architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let mut accumulator = 0_u32;
        let mut next = 0_usize;
        loop {
            let instruction = program[next];
            next += 1;
            let mut jump = |taken: bool| {
                next += usize::from(if taken { instruction.if_true } else { instruction.if_false });
            };
            match instruction.code {
                LOAD_WORD => {
                    accumulator = match instruction.value {
                        NUMBER_OFFSET => number,
                        ARCHITECTURE_OFFSET => architecture,
                        offset => {
                            let index = usize::try_from((offset - ARGUMENTS_OFFSET) / 8).unwrap();
                            u32::try_from(arguments[index] & 0xffff_ffff).unwrap()
                        }
                    }
                }
                AND => accumulator &= instruction.value,
                JUMP => next += usize::try_from(instruction.value).unwrap(),
                JUMP_IF_EQUAL => jump(accumulator == instruction.value),
                JUMP_IF_AT_LEAST => jump(accumulator >= instruction.value),
                JUMP_IF_ANY_BIT => jump(accumulator & instruction.value != 0),
                RETURN => return instruction.value,
                other => panic!("unknown instruction {other:#x}"),
            }
        }
    }

    /// The table read without the compiler.
    fn expect(decision: &Decision, arguments: [u64; 6]) -> u32 {
        let word = |index: u8| u32::try_from(arguments[usize::from(index)] & 0xffff_ffff).unwrap();
        match decision {
            Decision::Allow => ALLOW,
            Decision::Refuse(errno) => ERRNO | u32::from(*errno),
            Decision::If { argument, mask, values, then, otherwise } => {
                expect(if values.contains(&(word(*argument) & mask)) { then } else { otherwise }, arguments)
            }
            Decision::IfAnyBit { argument, mask, then, otherwise } => {
                expect(if word(*argument) & mask != 0 { then } else { otherwise }, arguments)
            }
        }
    }

    #[test]
    fn every_number_gets_the_decision_of_the_table() {
        let rules = table::rules();
        let program = compile(&rules);
        let unknown = Decision::Refuse(enosys());
        let words =
            [0_u64, 1, 2, 3, 10, 16, 17, 40, 0x5412, 0x541C, 0x1000_0000, 0x2000, 0x6000, 0xffff_ffff];
        for number in (0..1024).chain([0x4000_0000, 0x4000_0001, u32::MAX]) {
            let decision = rules.get(&number).unwrap_or(&unknown);
            for first in words {
                for second in words {
                    for third in [0, 1, 6, 17, 132, 262] {
                        let arguments = [first, second, third, 0, 0, 0];
                        assert_eq!(
                            run(&program, ARCHITECTURE, number, arguments),
                            expect(decision, arguments),
                            "call {number} with {arguments:?}",
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn another_architecture_is_killed() {
        let program = compile(&table::rules());
        assert_eq!(run(&program, 0x4000_0003, 1, [0; 6]), KILL_PROCESS);
    }

    #[test]
    fn program_stays_small() {
        let length = compile(&table::rules()).len();
        assert!(length < 400, "{length} instructions: loading it costs every sandbox");
    }

    #[test]
    fn a_far_jump_lands_where_a_near_one_would() {
        // Alternating decisions make an interval of each number, too many for the eight bits of a conditional jump.
        let rules: BTreeMap<u32, Decision> =
            (0..600).step_by(2).map(|number| (number, Decision::Allow)).collect();
        let program = compile(&rules);
        for number in 0..602 {
            let expected = if rules.contains_key(&number) { ALLOW } else { ERRNO | u32::from(enosys()) };
            assert_eq!(run(&program, ARCHITECTURE, number, [0; 6]), expected, "call {number}");
        }
    }

    #[test]
    fn raw_and_exotic_sockets_are_refused_and_plain_ones_allowed() {
        let program = compile(&table::rules());
        let socket = |domain: i32, kind: i32, protocol: i32| {
            let words = [domain, kind, protocol].map(|word| u64::try_from(word).unwrap());
            let number = u32::try_from(libc::SYS_socket).unwrap();
            run(&program, ARCHITECTURE, number, [words[0], words[1], words[2], 0, 0, 0])
        };
        for (domain, kind, protocol) in [
            (libc::AF_UNIX, libc::SOCK_STREAM, 0),
            (libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0),
            (libc::AF_INET6, libc::SOCK_DGRAM, libc::IPPROTO_UDP),
            (libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_ROUTE),
        ] {
            assert_eq!(socket(domain, kind, protocol), ALLOW, "{domain} {kind} {protocol}");
        }
        for (domain, kind, protocol) in [
            (libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP),
            (libc::AF_INET6, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0),
            (libc::AF_INET, libc::SOCK_SEQPACKET, libc::IPPROTO_SCTP),
            (libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP),
            (libc::AF_PACKET, libc::SOCK_RAW, 0),
            (libc::AF_VSOCK, libc::SOCK_STREAM, 0),
            (libc::AF_ALG, libc::SOCK_SEQPACKET, 0),
            (libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_AUDIT),
        ] {
            assert_ne!(socket(domain, kind, protocol), ALLOW, "{domain} {kind} {protocol}");
        }
    }
}
