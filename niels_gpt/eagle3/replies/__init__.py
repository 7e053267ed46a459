"""The target's own replies to chats, for a draft that is trained on what its target writes.

generate.py  prompts -> replies: greedy, or sampled by a seed and a name alone
chats.py     chats -> the same chats with the target's replies, turn by turn; what ends a chat early
output.py    the file of replies: appended durably while it is made, in the order of the chats when it is done
"""
