//! The programs that the suite needs, and how real and simulated sandboxes spell them.
//!
//! The real spelling needs what every Debian has: a POSIX shell, coreutils and perl-base.

/// What a program does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Program {
    /// Ends with this code.
    Exit(i32),
    /// Dies of this signal.
    Die(i32),
    /// Prints a line.
    Echo(String),
    /// Prints a line on each stream, standard output first.
    EchoBoth(String, String),
    /// Copies standard input to standard output.
    Cat,
    /// Prints a line, then sleeps for this many seconds.
    EchoAndSleep(String, u32),
    /// Prints a line, waits for a line of input, prints another.
    EchoReadEcho(String, String),
    /// Prints the numbers from 1 to this one, a line each.
    Count(u64),
    /// Waits for a line of input, then counts.
    ReadAndCount(u64),
    /// Prints this variable.
    PrintEnv(String),
    /// Prints the working directory.
    PrintDirectory,
    /// Prints the numeric user id.
    PrintUser,
    /// Prints the numbers of its open descriptors, a line each.
    PrintDescriptors,
    /// Prints the rows and columns of its terminal; with a text it prints that first and waits for a line of input.
    PrintSize(Option<String>),
    /// Sleeps for this many seconds.
    Sleep(u32),
    /// Writes a text to a file.
    WriteFile(String, String),
    /// Prints a file.
    ReadFile(String),
    /// Writes to a file until the disk is full, then ends with code 1.
    FillFile(String),
    /// Uses this many bytes of memory.
    Allocate(u64),
    /// Has this many children at once; ends with code 1 when one cannot be started.
    Fork(u64),
    /// Uses this many milliseconds of processor time.
    Burn(u32),
    /// Connects to a machine outside; ends with code 1 when that fails.
    Connect,
    /// Is no program.
    Missing,
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Returns the command line for a sandbox with a real system in it.
pub fn real_argv(program: &Program) -> Vec<String> {
    let sh =
        |script: &str, arguments: &[&str]| [words(&["sh", "-c", script, "sh"]), words(arguments)].concat();
    let perl = |script: &str, argument: &str| words(&["perl", "-e", script, argument]);
    match program {
        Program::Exit(code) => sh("exit $1", &[&code.to_string()]),
        Program::Die(signal) => sh("kill -$1 $$; sleep 60", &[&signal.to_string()]),
        Program::Echo(text) => words(&["echo", text]),
        Program::EchoBoth(out, err) => sh("echo \"$1\"; sleep 0.05; echo \"$2\" >&2", &[out, err]),
        Program::Cat => words(&["cat"]),
        Program::EchoAndSleep(text, seconds) => {
            sh("echo \"$1\"; exec sleep $2", &[text, &seconds.to_string()])
        }
        Program::EchoReadEcho(first, second) => {
            sh("echo \"$1\"; read line || exit 1; echo \"$2\"", &[first, second])
        }
        Program::Count(last) => words(&["seq", "1", &last.to_string()]),
        Program::ReadAndCount(last) => sh("read line || exit 1; exec seq 1 $1", &[&last.to_string()]),
        Program::PrintEnv(name) => words(&["printenv", name]),
        Program::PrintDirectory => words(&["pwd"]),
        Program::PrintUser => words(&["id", "-u"]),
        Program::PrintDescriptors => {
            perl("for (0..$ARGV[0]) { open(my $handle, '<&=', $_) and print \"$_\\n\" }", "2047")
        }
        Program::PrintSize(None) => words(&["stty", "size"]),
        Program::PrintSize(Some(text)) => sh("echo \"$1\"; read line || exit 1; exec stty size", &[text]),
        Program::Sleep(seconds) => words(&["sleep", &seconds.to_string()]),
        Program::WriteFile(path, text) => sh("printf %s \"$2\" > \"$1\"", &[path, text]),
        Program::ReadFile(path) => words(&["cat", path]),
        Program::FillFile(path) => sh("dd if=/dev/zero of=\"$1\" bs=64k 2>&1 || exit 1", &[path]),
        Program::Allocate(bytes) => perl("my $x = 'x' x $ARGV[0]; sleep 60", &bytes.to_string()),
        Program::Fork(count) => perl(
            "for (1..$ARGV[0]) { my $p = fork; if (!defined $p) { kill 'KILL', @c; print STDERR \"fork: $!\\n\"; exit 1 } \
             if (!$p) { sleep 60; exit 0 } push @c, $p } kill 'KILL', @c;",
            &count.to_string(),
        ),
        Program::Burn(millis) => {
            perl("1 while ((times)[0] + (times)[1]) * 1000 < $ARGV[0]", &millis.to_string())
        }
        Program::Connect => perl(
            "use Socket; socket(S, PF_INET, SOCK_STREAM, 0) or do { print STDERR \"socket: $!\\n\"; exit 1 }; \
             connect(S, sockaddr_in(80, inet_aton('192.0.2.1'))) or do { print STDERR \"connect: $!\\n\"; exit 1 };",
            "",
        ),
        Program::Missing => words(&["no-such-program-here"]),
    }
}

/// Returns the command line for a simulated sandbox.
pub fn sim_argv(program: &Program) -> Vec<String> {
    let seconds = |millis: u32| format!("{}.{:03}", millis / 1000, millis % 1000);
    match program {
        Program::Exit(code) => words(&["exit", &code.to_string()]),
        Program::Die(signal) => words(&["kill", &signal.to_string()]),
        Program::Echo(text) => words(&["echo", text]),
        Program::EchoBoth(out, err) => words(&["echo", out, "&&", "echo-err", err]),
        Program::Cat => words(&["cat"]),
        Program::EchoAndSleep(text, time) => words(&["echo", text, "&&", "sleep", &time.to_string()]),
        Program::EchoReadEcho(first, second) => words(&["echo", first, "&&", "read", "&&", "echo", second]),
        Program::Count(last) => words(&["seq", "1", &last.to_string()]),
        Program::ReadAndCount(last) => words(&["read", "&&", "seq", "1", &last.to_string()]),
        Program::PrintEnv(name) => words(&["env", name]),
        Program::PrintDirectory => words(&["pwd"]),
        Program::PrintUser => words(&["id"]),
        // A simulated program has no others.
        Program::PrintDescriptors => words(&["echo", "0\n1\n2"]),
        Program::PrintSize(None) => words(&["size"]),
        Program::PrintSize(Some(text)) => words(&["echo", text, "&&", "read", "&&", "size"]),
        Program::Sleep(time) => words(&["sleep", &time.to_string()]),
        Program::WriteFile(path, text) => words(&["write", path, text]),
        Program::ReadFile(path) => words(&["cat", path]),
        Program::FillFile(path) => words(&["fill", path]),
        Program::Allocate(bytes) => words(&["allocate", &bytes.to_string()]),
        Program::Fork(count) => words(&["fork", &count.to_string()]),
        Program::Burn(millis) => words(&["burn", &seconds(*millis)]),
        Program::Connect => words(&["connect"]),
        Program::Missing => words(&["no-such-program-here"]),
    }
}
