//! CPU time of a process, from `/proc/PID/stat`, and of the whole machine, from `/proc/stat`.

use std::{fs, io, time::Duration};

/// The kernel reports times to user space in hundredths of a second (USER_HZ) on every platform the benchmark runs on.
const TICK: Duration = Duration::from_millis(10);

/// User and system time that all threads of `pid` have consumed so far.
///
/// # Errors
/// If the process is gone, or `/proc` is not Linux's.
pub fn cpu_time(pid: u32) -> io::Result<Duration> {
    read_times(pid).map(|times| times.own)
}

/// The same of its children that have ended and were waited for, and of theirs.
///
/// # Errors
/// As [`cpu_time`].
pub fn reaped_cpu_time(pid: u32) -> io::Result<Duration> {
    read_times(pid).map(|times| times.reaped)
}

/// The same of `pid`, of its children that live, and of those that have ended: of a server with a process per connection.
///
/// # Errors
/// As [`cpu_time`].
pub fn family_cpu_time(pid: u32) -> io::Result<Duration> {
    let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    // One that ends between the two looks is among the reaped.
    let living = children.split_ascii_whitespace().filter_map(|child| cpu_time(child.parse().ok()?).ok());
    let living: Duration = living.sum();
    read_times(pid).map(|times| times.own + times.reaped + living)
}

#[derive(Debug, PartialEq, Eq)]
struct ProcessTimes {
    own: Duration,
    reaped: Duration,
}

fn read_times(pid: u32) -> io::Result<ProcessTimes> {
    parse(&fs::read_to_string(format!("/proc/{pid}/stat"))?)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat: not understood")))
}

/// Fields are counted after the last `)`, because the command name in front of it may hold spaces and parentheses.
fn parse(stat: &str) -> Option<ProcessTimes> {
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_ascii_whitespace().skip(11);
    let mut time = || {
        let (user, system): (u32, u32) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
        Some(TICK * user.checked_add(system)?)
    };
    Some(ProcessTimes { own: time()?, reaped: time()? })
}

/// CPU time of all cores since the machine started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineTimes {
    /// Time spent on anything, or taken away by the hypervisor.
    pub busy: Duration,
    /// Time spent on nothing.
    pub idle: Duration,
}

/// What the machine has done so far.
///
/// # Errors
/// If `/proc` is not Linux's.
pub fn read_machine() -> io::Result<MachineTimes> {
    parse_machine(&fs::read_to_string("/proc/stat")?)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/stat: not understood"))
}

/// The first line: `cpu user nice system idle iowait irq softirq steal …`; what follows is contained in `user`.
fn parse_machine(stat: &str) -> Option<MachineTimes> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let fields: Vec<u64> = line.split_ascii_whitespace().take(8).map_while(|field| field.parse().ok()).collect();
    let &[user, nice, system, idle, iowait, irq, softirq, steal] = fields.as_slice() else {
        return None;
    };
    let time = |ticks: u64| Duration::from_millis(10 * ticks);
    Some(MachineTimes { busy: time(user + nice + system + irq + softirq + steal), idle: time(idle + iowait) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_time_is_divided_into_busy_and_idle() {
        let machine = parse_machine("cpu  1 2 3 40 50 6 7 8 9 10\ncpu0 1\n").unwrap();
        assert_eq!(machine, MachineTimes { busy: Duration::from_millis(270), idle: Duration::from_millis(900) });
        assert!(super::read_machine().is_ok());
    }

    #[test]
    fn a_command_name_with_parentheses_does_not_shift_the_fields() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 100 0 0 0 12 30 5 2 20 0 1 0 100 1000 10";
        let times = ProcessTimes { own: Duration::from_millis(420), reaped: Duration::from_millis(70) };
        assert_eq!(parse(stat), Some(times));
    }

    #[test]
    fn this_process_can_be_read() {
        assert!(cpu_time(std::process::id()).is_ok());
        assert!(cpu_time(u32::MAX).is_err());
    }

    #[test]
    fn children_count_while_they_live_and_afterwards() {
        let spin = "n=0; while [ $n -lt 200000 ]; do n=$((n + 1)); done; echo done; read -r _";
        let mut parent = std::process::Command::new("sh")
            .args(["-c", &format!("sh -c '{spin}'; echo reaped; read -r _")])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = std::io::BufReader::new(parent.stdout.take().unwrap());
        let mut hears = |what: &str| {
            let mut line = String::new();
            std::io::BufRead::read_line(&mut said, &mut line).unwrap();
            assert_eq!(line.trim(), what);
        };
        hears("done");
        let living = family_cpu_time(parent.id()).unwrap();
        assert!(
            living > cpu_time(parent.id()).unwrap() && reaped_cpu_time(parent.id()).unwrap().is_zero(),
            "{living:?}"
        );
        std::io::Write::write_all(parent.stdin.as_mut().unwrap(), b"\n").unwrap();
        hears("reaped");
        assert!(
            reaped_cpu_time(parent.id()).unwrap() > Duration::ZERO && family_cpu_time(parent.id()).unwrap() >= living
        );
        drop(parent.stdin.take());
        parent.wait().unwrap();
    }
}
