//! Fields of a request: what makes one, and what a request may not say (RFC 9113, section 8).

use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Uri};

/// The names and values of a request, each with 32 bytes on top, as the protocol counts.
pub(super) const MAX_LIST: usize = 16 * 1024;
const FIELD: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Fields {
    method: Option<Method>,
    scheme: bool,
    path: Option<Uri>,
    authority: bool,
    headers: HeaderMap,
    size: usize,
    malformed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bad {
    Malformed,
    TooLarge,
}

impl Fields {
    pub(super) fn add(&mut self, name: &[u8], value: &[u8]) {
        self.size += name.len() + value.len() + FIELD;
        if MAX_LIST < self.size || self.malformed {
            return;
        }
        let taken = match name.strip_prefix(b":") {
            Some(name) => self.pseudo(name, value),
            None => self.header(name, value),
        };
        self.malformed |= taken.is_none();
    }

    /// Each once, and before all others.
    fn pseudo(&mut self, name: &[u8], value: &[u8]) -> Option<()> {
        if !self.headers.is_empty() {
            return None;
        }
        let again = match name {
            b"method" => self.method.replace(Method::from_bytes(value).ok()?).is_some(),
            // Calls are of paths here; `*` and the names of hosts are not.
            b"path" if value.starts_with(b"/") => self.path.replace(Uri::try_from(value).ok()?).is_some(),
            b"scheme" if !value.is_empty() => std::mem::replace(&mut self.scheme, true),
            b"authority" => std::mem::replace(&mut self.authority, true),
            _ => return None,
        };
        (!again).then_some(())
    }

    fn header(&mut self, name: &[u8], value: &[u8]) -> Option<()> {
        if name.iter().any(u8::is_ascii_uppercase) {
            return None;
        }
        let name = HeaderName::from_bytes(name).ok()?;
        if is_of_connection(name.as_str()) || (name == http::header::TE && value != b"trailers") {
            return None;
        }
        self.headers.append(name, HeaderValue::from_bytes(value).ok()?);
        Some(())
    }

    pub(super) fn are_trailers(&self) -> bool {
        let pseudo = self.method.is_some() || self.path.is_some() || self.scheme || self.authority;
        !self.malformed && !pseudo
    }

    pub(super) fn into_request(self) -> Result<Request<()>, Bad> {
        if MAX_LIST < self.size {
            return Err(Bad::TooLarge);
        }
        let (Some(method), Some(path), true, false) = (self.method, self.path, self.scheme, self.malformed) else {
            return Err(Bad::Malformed);
        };
        let mut request = Request::new(());
        *request.method_mut() = method;
        *request.uri_mut() = path;
        *request.version_mut() = http::Version::HTTP_2;
        *request.headers_mut() = self.headers;
        Ok(request)
    }
}

/// Fields that speak of a connection of HTTP/1, and have no place here.
pub(super) fn is_of_connection(name: &str) -> bool {
    matches!(name, "connection" | "keep-alive" | "proxy-connection" | "transfer-encoding" | "upgrade")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(fields: &[(&str, &str)]) -> Result<Request<()>, Bad> {
        let mut all = Fields::default();
        for (name, value) in fields {
            all.add(name.as_bytes(), value.as_bytes());
        }
        all.into_request()
    }

    const GOOD: [(&str, &str); 4] =
        [(":method", "POST"), (":scheme", "https"), (":path", "/a.B/C"), (":authority", "server:8994")];

    #[test]
    fn a_call_is_read() {
        let call = request(&[&GOOD[..], &[("te", "trailers"), ("x", "1"), ("x", "2")]].concat()).unwrap();
        assert_eq!((call.method(), call.uri().path()), (&Method::POST, "/a.B/C"));
        assert_eq!(call.headers().get_all("x").iter().collect::<Vec<_>>(), ["1", "2"]);
    }

    #[test]
    fn what_is_no_call_is_refused() {
        for missing in &GOOD[..3] {
            let fields: Vec<_> = GOOD.into_iter().filter(|it| it != missing).collect();
            assert_eq!(request(&fields).unwrap_err(), Bad::Malformed, "without {}", missing.0);
        }
        for (name, value) in [
            (":method", "GET"),
            (":path", "/twice"),
            (":status", "200"),
            (":unknown", "x"),
            ("Upper", "case"),
            ("connection", "close"),
            ("transfer-encoding", "chunked"),
            ("te", "gzip"),
            ("bad name", "x"),
            ("", "x"),
            ("x", "line\nbreak"),
        ] {
            assert_eq!(
                request(&[&GOOD[..], &[(name, value)]].concat()).unwrap_err(),
                Bad::Malformed,
                "{name}: {value}"
            );
        }
        let late = [("x", "1"), GOOD[0], GOOD[1], GOOD[2]];
        assert_eq!(request(&late).unwrap_err(), Bad::Malformed);
        assert_eq!(request(&[GOOD[0], GOOD[1], (":path", "*")]).unwrap_err(), Bad::Malformed);
    }

    #[test]
    fn too_much_is_refused() {
        let long = "v".repeat(MAX_LIST);
        assert_eq!(request(&[&GOOD[..], &[("x", &long)]].concat()).unwrap_err(), Bad::TooLarge);
    }
}
