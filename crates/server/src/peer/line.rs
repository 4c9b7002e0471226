//! The line between two servers, watched closely from both ends: a broken one is noticed within two seconds, and that
//! of a killed process at once, for its machine hangs up in its name.

use std::{io, os::fd::AsFd, time::Duration};

use rustix::net::sockopt;

/// Silence after which the other side is asked whether it is there, by TCP and by HTTP/2 alike.
pub const PROBE_AFTER: Duration = Duration::from_secs(1);
/// How long an HTTP/2 ping may stay unanswered.
pub const PING_TIMEOUT: Duration = Duration::from_secs(1);
const N_PROBES: u32 = 3;
/// How long sent bytes may stay unacknowledged. Pings are bytes too, so this finds a dead host also without keepalive.
pub const USER_TIMEOUT: Duration = Duration::from_secs(2);

/// Has the kernel watch a connection. Connections accepted from a listening socket inherit what was set on it.
pub fn watch(socket: impl AsFd) -> io::Result<()> {
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, PROBE_AFTER)?;
    sockopt::set_tcp_keepintvl(&socket, PROBE_AFTER)?;
    sockopt::set_tcp_keepcnt(&socket, N_PROBES)?;
    sockopt::set_tcp_user_timeout(&socket, u32::try_from(USER_TIMEOUT.as_millis()).unwrap_or(u32::MAX))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn accepted_connections_inherit_the_watch() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        watch(&listener).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        assert!(!sockopt::socket_keepalive(&client).unwrap());
        watch(&client).unwrap();
        for socket in [&accepted, &client] {
            assert!(sockopt::socket_keepalive(socket).unwrap());
            assert_eq!(sockopt::tcp_keepidle(socket).unwrap(), Duration::from_secs(1));
            assert_eq!(sockopt::tcp_keepintvl(socket).unwrap(), Duration::from_secs(1));
            assert_eq!(sockopt::tcp_keepcnt(socket).unwrap(), 3);
            assert_eq!(sockopt::tcp_user_timeout(socket).unwrap(), 2000);
        }
    }
}
