use super::*;

fn kept(remember: &Remember) -> Vec<u16> {
    let codes = [200, 204, 303, 307, 308, 400, 404, 409, 422, 429, 500, 503];
    codes.into_iter().filter(|code| remember.matches(StatusCode::from_u16(*code).unwrap())).collect()
}

#[test]
fn a_redirect_that_repeats_the_request_is_never_remembered() {
    let everything = (1..=5).map(StatusRange::Class).collect();
    let list = Remember::List { include: everything, exclude: Vec::new() };
    for remember in [Remember::All, Remember::Final, Remember::Success, list] {
        for status in [StatusCode::TEMPORARY_REDIRECT, StatusCode::PERMANENT_REDIRECT] {
            assert!(!remember.matches(status), "{remember} {status}");
        }
        assert!(remember.matches(StatusCode::SEE_OTHER), "{remember}");
    }
}

#[test]
fn a_list_excludes_what_has_an_exclamation_mark() {
    let code = |code| StatusRange::Code(StatusCode::from_u16(code).unwrap());
    let list = |include: &[StatusRange], exclude: &[StatusRange]| {
        kept(&Remember::List { include: include.to_vec(), exclude: exclude.to_vec() })
    };
    let [ok, client] = [StatusRange::Class(2), StatusRange::Class(4)];
    assert_eq!(list(&[ok, code(404)], &[]), [200, 204, 404]);
    assert_eq!(list(&[ok, client], &[code(409), code(204)]), [200, 400, 404, 422, 429]);
    assert_eq!(list(&[ok], &[ok]), [0; 0]);
    assert_eq!(list(&[], &[]), [0; 0], "an empty list remembers nothing");
    assert_eq!(list(&[], &[client]), [200, 204, 303, 500, 503], "exclusions alone: all but those");
    let all_but = Remember::all_except([StatusCode::CONFLICT, StatusCode::TOO_MANY_REQUESTS]);
    assert_eq!(kept(&all_but), [200, 204, 303, 400, 404, 422, 500, 503]);
    assert_eq!(all_but.to_string(), "!409 !429");
}
