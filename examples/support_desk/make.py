"""Write train.jsonl and valid.jsonl: questions to a library's front desk, to be classified into four desks."""

import json
from pathlib import Path

DESKS = {
    "lost book": [
        "I left my novel on the bus, what happens now?",
        "The atlas I borrowed has disappeared from my bag.",
        "My dog ate the cookbook I had from you.",
        "Someone took the library book from my desk at work.",
        "I cannot find the guide to Portugal anywhere in the house.",
        "A borrowed biography fell into the river.",
        "I moved house and the book is gone.",
        "What do I pay if a book never turns up again?",
        "My son lost the picture book at school.",
        "I think I threw the magazine away with the old papers.",
        "The book was in my stolen suitcase.",
        "I returned home without the dictionary and the cafe has not seen it.",
        "I misplaced a thriller that is due next week.",
        "The crime story I took out has vanished.",
        "My roommate packed your book and flew to Chile.",
        "I forgot the poetry collection in a hotel room and they cannot find it.",
    ],
    "late fee": [
        "Why do I owe two euros on my account?",
        "I brought the book back three days late, what does that cost?",
        "Can you cancel the charge, I was in hospital?",
        "Is there a fine when the deadline is on a holiday?",
        "How much is it per day after the due date?",
        "I got a bill although I returned everything on Monday.",
        "Do children also pay when they return things too late?",
        "My fine looks too high for one weekend.",
        "Can I pay what I owe by card?",
        "What is the maximum you charge for one overdue film?",
        "I was charged twice for the same overdue book.",
        "Do I have to pay before I can borrow again?",
        "I missed the due date by an hour, is that a charge?",
        "You want four euros from me for an overdue comic, why?",
        "Is the penalty lower for students?",
        "I would like to settle my overdue charges.",
    ],
    "room booking": [
        "I need a quiet place for six people on Thursday.",
        "Can our chess club meet in the building on Saturdays?",
        "Is the small study room free tomorrow at ten?",
        "How do I reserve the hall with the projector?",
        "We want to rehearse a play, do you have space?",
        "Please move my reservation of the blue room to four o'clock.",
        "How long may a group keep the meeting room?",
        "I want to cancel the seminar room I reserved.",
        "Does the reading room have space for a workshop of twenty?",
        "Can I reserve a desk with a screen for the afternoon?",
        "Is there a room where we may talk aloud?",
        "What does it cost to rent the event space for an evening?",
        "Our book circle needs a table on the first floor next week.",
        "Could I get the music room for an hour on Friday?",
        "Which rooms have a whiteboard and are free at noon?",
        "I would like to hold a language class at your place.",
    ],
    "new member": [
        "I just moved here and would like a card.",
        "What papers do I need to join?",
        "Can my daughter of seven sign up?",
        "How much is it to register for a year?",
        "Do tourists get a card for a month?",
        "Where do I sign up to borrow for the first time?",
        "Can I join online without coming in?",
        "I want to register my whole class.",
        "Is joining free for pensioners?",
        "How long until my first card is ready?",
        "May I borrow on the day I sign up?",
        "I am a student from abroad, can I become a reader here?",
        "Which form must my parents sign so that I get a card?",
        "I have never borrowed from you before, how do I begin?",
        "Do you give cards to people from the next town?",
        "My wife would like to enrol, what should she bring?",
    ],
}
VALID = 4  # of each desk's questions, never trained on
# The prompt contains one example of each desk. Without them a model this small never names a desk, so all its answers
# get the same score and each group has zero variance.
EXAMPLES = {
    "lost book": "I cannot find the book I borrowed.",
    "late fee": "Why do I have to pay for a late book?",
    "room booking": "We need a room for our meeting.",
    "new member": "How do I get a library card?",
}


def row(question: str, desk: str) -> str:
    messages = [{"role": "developer", "content": f"Sort each question into one of: {', '.join(DESKS)}."}]
    for answer, example in EXAMPLES.items():
        messages += [{"role": "user", "content": example}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": question})
    return json.dumps({"messages": messages, "desk": desk})


def main() -> None:
    here = Path(__file__).parent
    train = [row(q, desk) for desk, questions in DESKS.items() for q in questions[:-VALID]]
    valid = [row(q, desk) for desk, questions in DESKS.items() for q in questions[-VALID:]]
    (here / "train.jsonl").write_text("\n".join(train) + "\n")
    (here / "valid.jsonl").write_text("\n".join(valid) + "\n")


if __name__ == "__main__":
    main()
